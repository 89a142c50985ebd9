"""``--explain KEY``: the value of a key, and what set it, from the schema to the command line."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from shell import early_refusal

from ddptrain.config.compose import composed_tree
from ddptrain.keys import flat_values
from ddptrain.verbs.argv import parse
from ddptrain.verbs.main import main

MINE = """# @package _global_
defaults:
  - override /model: cnn
  - override /data: digits
  - override /optim: ours
train:
  batch_size: 32
  epochs: null
task:
  _target_: ddptrain.recipes.image.ImageClassification
"""
Said = Callable[..., list[str]]
OURS = "_target_: torch.optim.SGD\nlr: ${train.batch_size}\n"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Said:
    """What a command line prints, with the spaces between columns as one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ddptrain"])

    def run(words: str, code: int = 0) -> list[str]:
        assert main(words.split(" ")) == code
        found = capsys.readouterr()
        assert found.err == "" or code
        return [" ".join(line.split()) for line in (found.err if code else found.out).splitlines()]

    return run


def test_a_key_tells_what_set_it_the_oldest_first(said: Said) -> None:
    assert said("recipe=cnn_digits optim.lr=0.1 --explain optim.lr") == [
        "optim.lr = 0.1",
        "conf/optim/adamw.yaml 0.001",
        "conf/recipe/cnn_digits.yaml 0.003",
        "command line optim.lr=0.1",
    ]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("", "[console,jsonl,tensorboard,plots] (conf/config.yaml)"),
        ("+observers=webhook", "[console,jsonl,tensorboard,plots,webhook] (conf/config.yaml)"),
        ("observers=[jsonl,console]", "[jsonl,console] (command line)"),
        ("observers=console", "console (command line)"),
    ],
)
def test_a_list_of_choices_is_named_by_its_choices(said: Said, words: str, shown: str) -> None:
    assert said(f"{words} recipe=cnn_digits --explain observers".strip())[0] == f"observers = {shown}"


def test_a_recipe_that_includes_another_is_the_one_that_is_named(said: Said) -> None:
    Path("own/recipe").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - cnn_digits\ntrain:\n  epochs: 3\n"
    Path("own/recipe/mine.yaml").write_text(text)
    shown = said("--config-dir=own recipe=mine --explain recipe")
    assert (shown[0], shown[-1]) == ("recipe = mine", "command line recipe=mine")


def test_a_key_of_the_schema_tells_its_default_and_its_rule(said: Said) -> None:
    assert said("recipe=cnn_digits --explain=train.batch_size") == [
        "train.batch_size = 64",
        "Samples of one optimizer step over ALL ranks. Must be at least 1.",
        "default 128",
        "conf/recipe/cnn_digits.yaml 64",
    ]
    assert said("--explain precision")[:2] == [
        "precision = auto",
        "Must be one of auto, fp32, tf32, bf16, fp16.",
    ]


def test_a_section_tells_who_chose_it_and_what_set_each_key_last(said: Said) -> None:
    assert said("recipe=cnn_digits sched=step sched.gamma=0.5 +sched.x=1 --explain sched") == [
        "sched = step (command line)",
        "sched._target_ ddptrain.engine.lr_schedules.step conf/sched/step.yaml",
        "sched.warmup 0.05 conf/recipe/cnn_digits.yaml",
        "sched.milestones [0.5, 0.75] conf/sched/step.yaml",
        "sched.gamma 0.5 command line",
        "sched.x 1 command line",
    ]
    assert said("recipe=cnn_digits --explain optim")[0] == "optim = adamw (conf/recipe/cnn_digits.yaml)"
    assert said("--explain optim")[0] == "optim = sgd (conf/config.yaml)"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("data.root=a data.root=b --explain data.root", ["data.root = b", "data.root=a", "data.root=b"]),
        ("++data.root=a --explain data.root", ["data.root = a", "++data.root=a"]),
        ("+optim.eps=1e-4 --explain optim.eps", ["optim.eps = 0.0001", "+optim.eps=1e-4"]),
        ("data.augment={crop:3} --explain data.augment.crop", ["= 3", "data.augment={crop:3}"]),
        ("optim.betas=[0,0.5] --explain optim.betas", ["optim.betas = [0, 0.5]", "optim.betas=[0,0.5]"]),
        ("--explain run.dir", ["run.dir = null", "default null"]),
        ("--explain recipe", ["recipe = cnn_digits", "command line recipe=cnn_digits"]),
        ("--explain data.channels_last", ["data.channels_last = true (${channels_last})"]),
        ("channels_last=false --explain data.channels_last", ["= false (${channels_last})"]),
        (
            "--explain data.source",
            ["data.source._target_ ddptrain.data.images.digits.Digits conf/data/digits.yaml"],
        ),
    ],
)
def test_every_way_to_set_a_key_is_told(said: Said, words: str, expected: list[str]) -> None:
    found = said(f"recipe=cnn_digits {words}")
    rest = iter(found)
    assert all(any(line.endswith(wanted) for line in rest) for wanted in expected), found


def test_a_key_of_a_like_name_is_another(said: Said) -> None:
    found = said("recipe=cnn_digits train.steps=5 train.epochs=2 --explain train.steps")
    assert found[-1] == "command line train.steps=5"
    assert not any("train.epochs" in line for line in found)
    assert not any("eval" in line for line in said("recipe=cnn_digits seed=3 --explain seed"))


def test_a_recipe_of_ones_own_is_named_by_its_path(said: Said, tmp_path: Path) -> None:
    for name, content in {"recipe/mine.yaml": MINE, "optim/ours.yaml": OURS}.items():
        (tmp_path / "own" / name).parent.mkdir(parents=True)
        (tmp_path / "own" / name).write_text(content)
    given = "--config-dir=own recipe=mine"
    assert said(f"{given} --explain train.batch_size")[-1] == "own/recipe/mine.yaml 32"
    assert said(f"{given} --explain optim.lr") == [
        "optim.lr = 32 (${train.batch_size})",
        "own/optim/ours.yaml ${train.batch_size}",
    ]
    assert said(f"{given} --explain train.epochs")[-1] == "own/recipe/mine.yaml null"
    assert said(f"--config-dir={tmp_path}/own recipe=mine --explain optim")[0] == (
        "optim = ours (own/recipe/mine.yaml)"
    )


def test_a_recipe_of_an_installed_package_is_named_by_its_path(
    said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site/thatpackage"
    (package / "conf/recipe").mkdir(parents=True)
    for name in ("__init__.py", "conf/__init__.py"):
        (package / name).touch()
    (package / "conf/recipe/theirs.yaml").write_text(MINE.replace("ours", "sgd"))
    about = tmp_path / "site/thatpackage-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: thatpackage\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[ddptrain.conf]\nthatpackage = thatpackage.conf\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert said("recipe=theirs --explain train.batch_size")[-1] == (
        "site/thatpackage/conf/recipe/theirs.yaml 32"
    )


def test_another_optimizer_has_its_own_values(said: Said) -> None:
    assert said("recipe=cnn_digits optim=sgd --explain optim.lr") == [
        "optim.lr = 0.1",
        "conf/optim/sgd.yaml 0.1",
    ]
    assert said("recipe=cnn_digits optim=sgd optim.lr=1 --explain optim")[1:3] == [
        "optim._target_ torch.optim.SGD conf/optim/sgd.yaml",
        "optim.lr 1 command line",
    ]
    assert said("recipe=cnn_digits optim=sgd --explain optim.groups")[-1] == "conf/config.yaml []"


def test_augment_is_told_where_it_goes(said: Said) -> None:
    words = "recipe=cnn_cifar10 augment=standard augment.transforms.horizontal_flip.p=0.25"
    for key in ("augment", "data.augment"):
        assert said(f"{words} --explain {key}.transforms.horizontal_flip.p") == [
            f"{key}.transforms.horizontal_flip.p = 0.25",
            "conf/augment/standard.yaml 0.5",
            "command line augment.transforms.horizontal_flip.p=0.25",
        ]
        assert f"{key}.resized_crop.scale [0.08, 1.0] conf/augment/standard.yaml" in said(
            f"{words} --explain {key}"
        )


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("recipe=cnn_digits optim=sgd", marks=pytest.mark.long),
        "recipe=cnn_digits optim=sgd optim.weight_decay=0 sched=step strategy=single augment=standard",
        "recipe=finetune optim=muon_with_sgd optim.layer_decay=0.5",
        pytest.param("recipe=transformer_text sched=wsd", marks=pytest.mark.long),
    ],
)
def test_what_is_shown_is_what_is_trained(
    said: Said, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By --cfg, --help and --explain."""
    monkeypatch.setattr(sys, "argv", ["ddptrain"])
    composed = composed_tree(parse(words.split(" ")))
    assert composed is not None
    tree, _ = composed
    whole = {key: value for key, value in flat_values(tree).items() if value != {}}
    parts = {"--cfg job": tree, "--help": tree, "-c job -p data.source": tree["data"]["source"]}
    for options, part in parts.items():
        assert main(f"{words} {options}".split(" ")) == 0
        printed = capsys.readouterr().out
        assert yaml.safe_load(printed.rpartition("key=value):\n")[2]) == part
    for section in ("optim", "sched", "strategy", "data"):
        lines = [line for line in said(f"{words} --explain {section}") if " = " not in line]
        told = dict(line.split(" ", 2)[:2] for line in lines)
        inside = {key: value for key, value in whole.items() if key.startswith(f"{section}.")}
        assert told.keys() == inside.keys()
        for key, value in inside.items():
            if " " not in str(value):
                assert told[key] == (value if isinstance(value, str) else json.dumps(value))


def test_a_part_that_is_not_there_is_refused(said: Said) -> None:
    assert (
        "-p optm: there is no such section. Did you mean optim?"
        in said("recipe=cnn_digits --cfg job -p optm", code=2)[-1]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("recipe=cnn_digits --explain lr", "lr: there is no such key. Did you mean optim.lr?"),
        ("recipe=cnn_digits --explain optim.rl", "optim.rl: there is no such key. Did you mean optim.lr?"),
        ("recipe=cnn_digits --explain optim.momentum", "optim=rmsprop, optim=sgd have it"),
        ("recipe=cnn_digits --explain hydra.run.dir", "hydra.run.dir: there is no such key."),
        ("recipe=cnn_digits optim.fused=false --explain optim.lr", "add it: +optim.fused=..."),
        ("recipe=cnn_digits --explain optim.lr.x", "optim.lr.x: there is no such key."),
        ("recipe=cnn_digits --explain train..x", "train..x: there is no such key."),
        ("recipe=cnn_digits optim.rl=1 --explain optim.lr", "optim.rl: there is no such key."),
        ("recipe=cnn_digit --explain optim.lr", "recipe=cnn_digit: there is no such choice."),
        ("recipe=cnn_digits optim.lr=1,2 --explain optim.lr", "--multirun"),
        ("recipe=cnn_digits train.batch_size=x --explain train", "train.batch_size"),
        ("recipe=cnn_digits --explain", "--explain: needs a value"),
        ("--multirun recipe=cnn_digits --explain optim.lr", "--explain=optim.lr: shows one config"),
        ("evaluate run=r --explain optim.lr", "--explain: is for train, launch, bench, prove"),
        ("recipe=cnn_digits --explian=optim.lr", "Did you mean --explain?"),
    ],
)
def test_what_can_not_be_explained_is_refused(said: Said, words: str, message: str) -> None:
    assert message in "\n".join(said(words, code=2))


@pytest.mark.parametrize("verb", ["launch", "write out=new", "prove resume", "train"])
def test_every_verb_that_composes_explains_and_does_nothing_else(
    said: Said, verb: str, tmp_path: Path
) -> None:
    assert said(f"{verb} recipe=cnn_digits --explain optim.lr")[0] == "optim.lr = 0.003"
    assert list(tmp_path.iterdir()) == []


def test_it_comes_at_once_and_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from ddptrain.verbs.main import main; code = main(sys.argv[1:]);"
        " sys.exit(code or 'torch' in sys.modules)"
    )
    words = ["recipe=cnn_digits", "--explain", "train"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done
    assert "train.batch_size" in done.stdout
    early_refusal(tmp_path, "recipe=cnn_digits --explain trian")
