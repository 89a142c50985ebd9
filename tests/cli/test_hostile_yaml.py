"""A stranger's YAML: no tricks of the language, no way out of its folder, no look at the environment."""

import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostile import EVIL, RECIPE, Place, saved
from shell import refusal


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, monkeypatch, capsys)


# -- names and places ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["recipe=../../theirs/recipe/evil"],
        ["recipe=THEIRS/recipe/evil"],
        ["recipe=cnn_digits", "model=../../theirs/recipe/evil"],
        ["recipe=cnn_digits", "model=THEIRS/recipe/evil"],
        ["recipe=[../evil]"],
        ["recipe=cnn_digits,../evil", "--multirun"],
        ["recipe='../evil'"],
    ],
)
def test_a_choice_is_a_name_and_no_path(place: Place, words: list[str]) -> None:
    place.recipe(RECIPE)
    assert "takes a name, not a path" in place.refused(words)


@pytest.mark.parametrize(
    "item",
    [
        "/../../theirs/recipe/evil",
        "//THEIRS/recipe/evil",
        "override /model: ../../evil",
        "/recipe: ['../evil']",
        "/recipe/${oc.env:SECRET}",
        "/recipe/~/evil",
        "..\\evil",
        "5",
        "{a: b, c: d}",
        "{/model: {a: b}}",
        "[a]",
    ],
)
def test_defaults_name_what_is_in_the_folders_of_yamls(place: Place, item: str) -> None:
    place.recipe(f"defaults:\n  - {item}\n")
    assert "theirs/recipe/evil.yaml: defaults: " in place.refused(EVIL)


@pytest.mark.parametrize("folder", ["CANARY", "../canary", "a/../../canary", "~/canary"])
def test_a_recipe_names_no_folder_outside_the_current_one(place: Place, folder: str) -> None:
    place.recipe(RECIPE + f"run: {{dir: {folder}}}")
    assert "run.dir=" in place.refused([*EVIL, "run.resume=nowhere"])


@pytest.mark.parametrize("address", ["CANARY", "mirror", "s3://theirs/run"])
def test_a_recipe_names_no_place_to_mirror_the_run_to(place: Place, address: str) -> None:
    place.recipe(RECIPE + f"run: {{mirror: '{address}'}}")
    assert "run.mirror=" in place.refused(EVIL)


@pytest.mark.parametrize(
    ("key", "word"),
    [("mirror: s3://theirs/run", "run={resume:never}"), ("dir: ../canary", "run={mirror:null}")],
)
def test_a_section_that_is_typed_without_the_key_allows_nothing(place: Place, key: str, word: str) -> None:
    place.recipe(RECIPE + f"run: {{{key}}}")
    assert f"run.{key.partition(':')[0]}=" in place.refused([*EVIL, word])


@pytest.mark.parametrize("name", ["../../canary", "CANARY", "a/../../b", "", 5, ["x"]])
def test_a_saved_recipe_is_a_name(place: Place, name: Any) -> None:
    assert "recipe" in place.refused(["evaluate", f"run={place.run_of({'recipe': name})}"])


# -- the environment -------------------------------------------------------------------------------

LEAKS = [
    "${oc.env:SECRET}",
    "${oc.env:SECRET,default}",
    "${oc.env:${ema.name}}",
    "x${oc.env:SECRET}y",
    "${oc.env:PATH}",
    "${oc.env:AWS_SECRET_ACCESS_KEY,null}",
    "${oc.decode:'${oc.env:SECRET}'}",
    "${oc.decode:${oc.env:SECRET}}",
    "${oc.create:{a: '${oc.env:SECRET}'}}",
    "${oc.select:nowhere,${oc.env:SECRET}}",
    "${env:SECRET}",
    "${eval:1+1}",
    "${hydra:job.env_set.SECRET}",
]


@pytest.mark.parametrize("leak", LEAKS)
def test_a_recipe_reads_no_secrets(place: Place, leak: str) -> None:
    place.recipe(RECIPE + f'run: {{resume: "{leak}"}}')
    assert "run.resume" in place.refused(EVIL)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ("train: {epoch: 2}", "train.epoch: there is no such key. Did you mean train.epochs?"),
        ("sede: 3", "sede: there is no such key. Did you mean seed?"),
    ],
)
def test_a_mistyped_key_of_a_recipe_is_told_what_it_may_have_meant(
    place: Place, sections: str, said: str
) -> None:
    place.recipe(RECIPE + sections)
    assert said in place.refused(EVIL)


@pytest.mark.parametrize("leak", LEAKS)
def test_a_saved_config_reads_no_secrets(place: Place, leak: str) -> None:
    run = place.run_of({"run": {"resume": leak}})
    assert "run.resume" in place.refused(["evaluate", f"run={run}"])


def test_the_command_line_reads_no_secrets_into_the_saved_config(place: Place) -> None:
    message = place.refused(["recipe=cnn_digits", "device=cpu", "run.resume=${oc.env:SECRET}"])
    assert "if it is no secret, name it on the command line: --env SECRET" in message


def test_places_and_job_numbers_are_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SCRATCH", raising=False)
    place.recipe(RECIPE + "train: {weight_decay_on: 'a${oc.env:SLURM_JOB_ID}${oc.env:SCRATCH,-b}'}")
    assert "train.weight_decay_on=a17-b: must be one of" in place.refused(EVIL)
    place.recipe(RECIPE + "run: {resume: 'a${oc.env:SCRATCH}'}")
    assert "run.resume: ${oc.env:SCRATCH}: is not set" in place.refused(EVIL)


# -- tricks of YAML --------------------------------------------------------------------------------


def doubled(levels: int, leaf: str = "x") -> str:
    """A list that aliases make 2 ** levels long."""
    lines = [f"a0: &a0 [{leaf}]"]
    lines += [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, levels)]
    return "\n".join(lines)


def looked_up(levels: int, form: str) -> str:
    lines = ["  k0: xxxxxxxx"]
    lines += [f"  k{i}: " + form.format(f"${{task.k{i - 1}}}") for i in range(1, levels)]
    return "\n".join(reversed(lines))


PLAIN, MANY, DEEP, ALIAS = "is no plain value", "more than 10,000 values", "32 levels deep", "no whole value"
READ = r"can't be read \(.*"
TRICKS = {
    "apply": ("train: !!python/object/apply:os.system ['touch CANARY']", PLAIN),
    "apply by a directive": ("%TAG ! tag:yaml.org,2002:python/\n---\nx: !object/apply:os.system ['']", PLAIN),
    "new": ("train: !!python/object/new:os.system ['touch CANARY']", PLAIN),
    "name": ("train: !!python/name:os.system", PLAIN),
    "module": ("train: !!python/module:antigravity", PLAIN),
    "path": ("run: {dir: !!python/object/apply:pathlib.PosixPath [CANARY]}", PLAIN),
    "tuple": ("optim: {betas: !!python/tuple [0.9, 0.99]}", PLAIN),
    "binary": ("run: {resume: !!binary aGVsbG8=}", PLAIN),
    "set": ("train: !!set {epochs}", PLAIN),
    "own tag": ("train: !evil {epochs: 1}", PLAIN),
    "many aliases": (doubled(40), MANY),
    "aliases of a long text": (doubled(12, "x" * 100_000), MANY),
    "an alias of itself": ("task: &a {x: *a}", ALIAS),
    "a merge of itself": ("task: &a {<<: *a}", ALIAS),
    "no such alias": ("task: {x: *b}", ALIAS),
    "deep lists": ("task: {x: " + "[" * 5000 + "]" * 5000 + "}", DEEP),
    "deep mappings": ("task: {x: " + "{a: " * 5000 + "1" + "}" * 5000 + "}", DEEP),
    "deep dashes": ("task:\n  " + "- " * 5000 + "x", DEEP),
    "a large file": ("#" + "x" * 300_000, "larger than 262,144 bytes"),
    "many values": ("task: {x: [" + "1," * 20_000 + "]}", MANY),
    "twice the same key": ("train: {epochs: 1, epochs: 2}", f"{READ}duplicate key epochs"),
    "twice the same section": ("train: {epochs: 1}\ntrain: {epochs: 2}", f"{READ}duplicate key train"),
    "a long number": ("seed: " + "9" * 5000, f"{READ}4300 digits"),
    "two documents": ("train: {epochs: 1}\n---\ntrain: {epochs: 2}", f"{READ}expected a single document"),
    "no end": ("train: {epochs: 1", f"{READ}while parsing a flow mapping"),
    "a tab": ("train:\n\tepochs: 1", f"{READ}character '.t'"),
    "a control character": ("train: \x07", f"{READ}unacceptable character"),
    "numbers as keys": ("train: {1: 2}", r"^train\.1: |^train: 1 is no key"),
    "a key that is no text": ("? [a, b]\n: 1", f"{READ}unhashable key"),
    "nothing as a key": ("task: {null: 1}", f"{READ}Incompatible key type"),
}


def tricked(whole: dict[str, Any], trick: str) -> str:
    """A config that is as it should be but for the trick."""
    text, _ = TRICKS[trick]
    rest = {key: value for key, value in whole.items() if not text.startswith(f"{key}:")}
    return text if text.startswith("%") else yaml.safe_dump(rest) + text


@pytest.mark.parametrize("trick", TRICKS)
def test_a_recipe_plays_no_tricks(place: Place, trick: str) -> None:
    place.recipe("# @package _global_\n" + tricked(yaml.safe_load(RECIPE), trick))
    assert re.search(TRICKS[trick][1], place.refused(EVIL))


@pytest.mark.parametrize("trick", TRICKS)
def test_a_saved_config_plays_no_tricks(place: Place, trick: str) -> None:
    run = place.run_of({})
    (run / "config.yaml").write_text(place.filled(tricked(saved(), trick)))
    assert re.search(TRICKS[trick][1], place.refused(["evaluate", f"run={run}"]))


@pytest.mark.parametrize("form", ["'{0}{0}'", "['{0}', '{0}']", "'{0} {0} {0}'", "{{a: '{0}', b: '{0}'}}"])
def test_interpolations_do_not_fill_the_memory(place: Place, form: str) -> None:
    place.recipe(RECIPE + looked_up(24, form))
    assert "a config may look up 200 values" in place.refused(EVIL)


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "5", "a: b: c", "\ufeff\x00", "[]"])
def test_what_holds_no_keys_is_no_recipe(place: Place, text: str) -> None:
    place.recipe(text)
    assert "recipe/evil.yaml" in place.refused(EVIL)


def test_recipes_that_include_each_other_are_refused(place: Place) -> None:
    place.recipe("# @package _global_\ndefaults:\n  - /recipe/other\n")
    place.recipe("# @package _global_\ndefaults:\n  - /recipe/evil\n", "recipe/other")
    assert "include each other" in place.refused(EVIL)


@pytest.mark.parametrize("text", [doubled(40), RECIPE + looked_up(24, "'{0}{0}'"), "x: " + "[" * 100_000])
def test_a_real_command_line_stays_small(place: Place, text: str) -> None:
    """Under 1 GiB of address space, without torch, which a refusal needs no more than this."""
    place.recipe(text)
    words = [place.filled(word) for word in EVIL]
    ended = subprocess.run(
        [sys.executable, "-m", "ddptrain", *words],
        capture_output=True,
        text=True,
        timeout=5,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)),
    )
    assert ended.returncode == 2, ended
    assert ended.stderr.count("ddptrain: ") == 1
    assert "Traceback" not in ended.stderr


def test_real_command_lines_execute_nothing(place: Place) -> None:
    place.recipe(RECIPE + "hydra: {callbacks: {x: {_target_: logging.FileHandler, filename: CANARY}}}")
    assert "Hydra's own" in refusal(place.work, [place.filled(word) for word in EVIL])
    place.recipe("train: !!python/object/apply:os.system ['touch CANARY']")
    assert "no plain value" in refusal(place.work, [place.filled(word) for word in EVIL])
    run = place.run_of(
        {"model": {"_target_": "torch.load", "f": "THEIRS/payload.pkl", "weights_only": False}}
    )
    assert "not allowed" in refusal(place.work, ["evaluate", f"run={run}"])
    assert not place.canary.exists()
