"""Wrong input, through the real command line: exit code 2 and one message that names what is wrong."""

import hashlib
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from shell import ddptrain, early_refusal, refusal, under_torchrun

from ddptrain.engine.saved_checkpoint import FORMAT, sealed

CHECKOUT = Path(__file__).parents[2]
TYPED = "recipe=cnn_digits device=cpu"
SMALL = "recipe=cnn_digits device=cpu model.width=8 train.steps=2 observers=[console,jsonl,plots]"


# -- keys, types and choices -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.epocs=2", ["train.epocs: ", "Did you mean train.epochs"]),
        ("trian.epochs=2", ["trian.epochs: ", "Did you mean train.epochs"]),
        ("sede=2", ["sede: ", "Did you mean seed"]),
        ("+sede=2", ["sede: ", "Did you mean seed"]),
        ("+train.typo=1", ["train.typo: there is no such key"]),
        ("+train.epocs=2", ["train.epocs: ", "Did you mean", "epochs?"]),
        ("+experiment=big", ["experiment: there is no such key"]),
        ("optim.lrr=0.1", ["optim.lrr: ", "Did you mean optim.lr"]),
        (
            "data.augment.horizontal_flipp=true",
            ["data.augment.horizontal_flipp: ", "Did you mean data.augment.horizontal_flip"],
        ),
        ("model.widht=3", ["model.widht: ", "Did you mean model.width"]),
        ("model.cell=gru", ["model.cell: there is no such key. model=recurrent has it"]),
        ("data.source.path=x.txt", ["data.source.path: there is no such key. data=", ", data=text have it"]),
    ],
)
def test_a_misspelt_key_is_named_at_once(tmp_path: Path, override: str, said: list[str]) -> None:
    message = early_refusal(tmp_path, f"{TYPED} {override}")
    for words in said:
        assert words in message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.epochs=two", ["train.epochs=two: must be a number."]),
        ("train.epochs=", ["train.epochs"]),
        ("train.batch_size=1.5", ["train.batch_size=1.5: must be a whole number."]),
        ("channels_last=maybe", ["channels_last=maybe: must be true or false."]),
        ("device=null", ["device", "null"]),
        ("train=5", ["train=5: must hold keys and their values: train.<key>=..."]),
        ("train.epochs = 3", ["train.epochs =: write key=value, without a blank beside the =."]),
        ("train.epochs =3", ["train.epochs =3: write key=value, without a blank"]),
        ("train.epochs= 3", ["train.epochs= 3: write key=value, without a blank"]),
        ("train.epochs=${nope}", ["train.epochs", "nope"]),
        ("~task", ["task: has no value, and needs one"]),
        ("run.dir=runs/é", ["beyond ASCII", "\"run.dir='runs/é'\""]),
    ],
)
def test_a_wrong_type_is_named_with_the_value_and_the_rule(
    tmp_path: Path, override: str, said: list[str]
) -> None:
    message = early_refusal(tmp_path, f"{TYPED} {override}")
    for words in said:
        assert words in message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("recipe=cnn_digit", ["recipe=cnn_digit: ", "Did you mean cnn_digits?", "mobilenet_cifar10"]),
        ("data=cifar11", ["data=cifar11: ", "Did you mean cifar10?", "shapes"]),
        ("strategy=ddpp", ["strategy=ddpp: ", "Did you mean ddp", "single"]),
        ("sched=cosin", ["sched=cosin: ", "Did you mean cosine?"]),
        ("precision=fp61", ["precision=fp61: ", "Did you mean fp16?", "bf16"]),
        ("compile=fast", ["compile=fast: ", "max-autotune"]),
    ],
)
def test_an_unknown_choice_is_named_with_the_known_ones(
    tmp_path: Path, override: str, said: list[str]
) -> None:
    arguments = override if override.startswith("recipe=") else f"{TYPED} {override}"
    message = early_refusal(tmp_path, arguments)
    for words in said:
        assert words in message


@pytest.mark.parametrize("override", ["data=null", "optim=5", "model=null", "recipe=null", "recipe="])
def test_a_group_takes_the_name_of_a_choice(tmp_path: Path, override: str) -> None:
    group = override.partition("=")[0]
    message = early_refusal(tmp_path, override if group == "recipe" else f"{TYPED} {override}")
    assert group in message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("train.batch_size=0", ["train.batch_size=0: must be at least 1."]),
        ("train.steps=-1", ["train.steps=-1: must be at least 1."]),
        ("train.epochs=-2", ["train.epochs=-2", "must be above 0."]),
        ("train.epochs=nan", ["train.epochs=nan: must be a finite number."]),
        ("train.epochs=inf", ["train.epochs=inf: must be a finite number."]),
        ("seed=-1", ["seed=-1: must be at least 0."]),
        ("ema.decay=-0.5 log.every=0", ["ema.decay=-0.5: must be above 0.", "log.every=0: must be"]),
        ("train.epochs=null train.steps=null", ["train.epochs, train.steps: give one"]),
    ],
)
def test_a_value_out_of_its_range_is_named_with_the_range(
    tmp_path: Path, overrides: str, said: list[str]
) -> None:
    message = early_refusal(tmp_path, f"{TYPED} {overrides}")
    for words in said:
        assert words in message


def test_every_wrong_argument_of_every_node_is_named_in_one_message(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        f"{TYPED} +optim.lrr=0.1 +data.augment.horizontal_flipp=true +task.label_smothing=0.1 +model.widht=3"
        " optim.weight_decay=nan data.augment.horizontal_flip=maybe data.workers=two model.hidden=1.5"
        " +data.augment._partial_=true +optim._args_=[1] +optim.nesterov=true",
    )
    assert message.splitlines() == [
        "task.label_smothing: ddptrain.recipes.image.ImageClassification takes no such argument."
        " Did you mean task.label_smoothing?",
        "model.hidden=1.5: must be a whole number.",
        "model.widht: ddptrain.recipes.cnn.SmallCnn takes no such argument. Did you mean model.width?",
        "data.workers=two: must be a whole number or auto.",
        "data.augment.horizontal_flip=maybe: must be true or false or alternate.",
        "data.augment.horizontal_flipp: ddptrain.data.images.augment.Augment takes no such argument."
        " Did you mean data.augment.horizontal_flip?",
        "data.augment._partial_: only _target_ has a meaning here; remove it.",
        "optim.weight_decay=nan: must be a finite number.",
        "optim.lrr: torch.optim.AdamW takes no such argument. Did you mean optim.lr?",
        "optim._args_: only _target_ has a meaning here; remove it.",
        "optim.nesterov: torch.optim.AdamW takes no such argument. It takes lr, betas, eps, weight_decay,"
        " amsgrad, maximize, foreach, capturable, differentiable, fused. '~optim.nesterov' takes this one"
        " out, where a config sets it.",
    ]
    assert not (tmp_path / "runs").exists()


def test_an_optimizer_rate_that_is_no_number_is_named(tmp_path: Path) -> None:
    assert "optim.lr=fast: must be a finite number." in refusal(tmp_path, f"{TYPED} optim.lr=fast")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.lr=-1", ["optim", "learning rate: -1"]),
        ("model.width=-3", ["model", "-3"]),
        ("~model", ["needs model, which this recipe does not give; it gives data. Choose one: model=..."]),
        ("data.augment.crop=-1", ["data.augment.crop=-1: must be 0 or more"]),
        ("data.source._target_=ddptrain.data.images.source.ImageSource", ["data.source", "ImageSource"]),
    ],
)
def test_a_value_that_a_target_refuses_is_named_with_its_section(
    tmp_path: Path, override: str, said: list[str]
) -> None:
    message = refusal(tmp_path, f"{TYPED} train.steps=1 {override}")
    for words in said:
        assert words in message


@pytest.mark.parametrize(
    "arguments", ["recipe=cnn_digits train.epocs=2", "recipe=cnn_digits --cfg job", "--help"]
)
def test_composing_imports_no_torch(tmp_path: Path, arguments: str) -> None:
    script = """
import sys
from ddptrain.verbs.main import main
try:
    main(sys.argv[1:])
finally:
    print("torch" in sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.stdout.splitlines()[-1] == "False", ended


_HEAD = "# @package _global_\ndefaults:\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("observers: [console, jsonl]", 'observers: ["console", "jsonl"]: must hold keys and their values.'),
        ("train: [1, 2]", "train: [1, 2]: must hold keys"),
        (
            "sched: cosine",
            "sched: cosine: must hold keys and their values. To choose one by its name, write in",
        ),
        ("data: {source: [digits]}", 'data.source: ["digits"]: must hold keys'),
    ],
)
def test_a_list_in_the_place_of_a_section_is_named_with_its_file(
    tmp_path: Path, line: str, said: str
) -> None:
    (tmp_path / "conf/recipe").mkdir(parents=True)
    (tmp_path / "conf/recipe/mine.yaml").write_text(
        f"# @package _global_\ndefaults:\n  - cnn_digits\n  - _self_\n{line}\n"
    )
    message = early_refusal(tmp_path, "--config-dir=conf recipe=mine device=cpu")
    assert message.startswith(f"conf/recipe/mine.yaml: {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: {epochs: 3}", "its first line must be `# @package _global_`"),
        (f"{_HEAD}  - model: cnn", "`- model: cnn` must be `- override /model: cnn`"),
        (f"{_HEAD}  - /model: cnn", "`- /model: cnn` must be `- override /model: cnn`"),
        (f"{_HEAD}  - override model: cnn", "`- override model: cnn` must be `- override /model: cnn`"),
        (f"{_HEAD}  - recipe: cnn_digits", "`- recipe: cnn_digits` must be `- cnn_digits`"),
    ],
)
def test_a_recipe_that_composes_nothing_is_told_which_line_to_write(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "conf/recipe").mkdir(parents=True)
    (tmp_path / "conf/recipe/mine.yaml").write_text(text)
    message = early_refusal(tmp_path, "--config-dir=conf recipe=mine device=cpu")
    assert "conf/recipe/mine.yaml: " in message
    assert said in message


def test_a_mistyped_group_in_a_recipe_is_named(tmp_path: Path) -> None:
    (tmp_path / "conf/recipe").mkdir(parents=True)
    (tmp_path / "conf/recipe/mine.yaml").write_text(f"{_HEAD}  - override /modle: cnn")
    message = early_refusal(tmp_path, "--config-dir=conf recipe=mine device=cpu")
    assert message.startswith("recipe/mine.yaml: defaults: there is no group modle. Did you mean model?")


# -- verbs and the environment ---------------------------------------------------------------------


def test_without_arguments_the_recipes_are_listed(tmp_path: Path) -> None:
    message = early_refusal(tmp_path, "")
    recipes = [path.stem for path in (CHECKOUT / "conf" / "recipe").glob("*.yaml")]
    assert recipes
    for name in recipes:
        assert name in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("trian recipe=cnn_digits", ["trian: ", "Did you mean train?", "evaluate"]),
        ("recipe mobilenet_cifar10", ["recipe=<choice>", "no spaces"]),
        ("evaluate", ["evaluate run="]),
        ("evaluate run=nowhere", ["run=nowhere: ", "there is no such folder"]),
        (f"{TYPED} train.epochs", ["train.epochs"]),
        (f"{TYPED} train.epochs=[1", ["[1"]),
        (f"{TYPED} --bogus", ["--bogus"]),
        ("--config-dir nowhere recipe=cnn_digits", ["nowhere"]),
    ],
)
def test_a_wrong_command_line_is_explained(tmp_path: Path, arguments: str, said: list[str]) -> None:
    message = early_refusal(tmp_path, arguments)
    for words in said:
        assert words in message


@pytest.mark.parametrize("size", ["2", "two"])
def test_a_sweep_inside_torchrun_is_refused(tmp_path: Path, size: str) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": size}
    message = early_refusal(tmp_path, f"--multirun {TYPED} optim.lr=0.1,0.2", **ranks)
    assert "WORLD_SIZE" in message or "--multirun" in message


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_incomplete_rank_environment_is_refused_on_any_rank(tmp_path: Path, rank: str) -> None:
    message = refusal(tmp_path, TYPED, RANK=rank)
    assert "RANK is set but WORLD_SIZE" in message
    assert "torchrun" in message


def test_ranks_print_a_typo_once(tmp_path: Path) -> None:
    ended = under_torchrun(tmp_path, 2, f"-m ddptrain {TYPED} train.epocs=2")
    assert ended.err.count("ddptrain: train.epocs: there is no such key.") == 1, ended.err
    assert "exitcode  : 2" in ended.err


# -- devices and strategies ------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="here cuda is a right answer")
def test_cuda_never_falls_back_to_the_cpu(tmp_path: Path) -> None:
    message = refusal(tmp_path, "recipe=cnn_digits device=cuda")
    assert message.startswith("device=cuda: ")
    assert "device=cpu" in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(torch.cuda.device_count() > 7, reason="here cuda:7 is a right answer")
@pytest.mark.parametrize("device", ["cuda:7", "gpu"])
def test_a_device_that_is_not_there_is_named(tmp_path: Path, device: str) -> None:
    message = refusal(tmp_path, f"recipe=cnn_digits device={device}")
    assert message.startswith(f"device={device}: ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("strategy=ddp", ["strategy=ddp: needs ranks", "torchrun"]),
        ("strategy.sync_batchnorm=true", ["strategy.sync_batchnorm=true: ", "cpu"]),
        ("strategy.static_graph=x", ["strategy.static_graph=x: must be true or false."]),
        ("strategy.bucket_cap_mb=25MB", ["strategy.bucket_cap_mb=25MB: must be a finite number."]),
        ("strategy=ddp strategy.compression=int8", ["strategy.compression=int8: must be one of"]),
        ("strategy=single +strategy.shards=2", ["strategy.shards: ", "takes no such argument"]),
        ("strategy=single strategy._target_=torch.optim.SGD", ["strategy"]),
        ("observers.console=null", ["observers.console=None: must be a node"]),
        ("~strategy._target_", ["strategy._target_: needs the dotted name"]),
        (
            "strategy=strict ~strategy.shards",
            ["strategy.shards: ", "Strict needs it; set strategy.shards=..."],
        ),
        ("train.eval_batch_size=null", ["train.eval_batch_size=null: must have a value"]),
        ("observers.console._target_=ddptrain.recipes.cnn.SmallCnn", ["observers.console", "SmallCnn"]),
        ("+controllers.one={_target_:ddptrain.observe.console.Console}", ["controllers.one", "Controller"]),
    ],
)
def test_what_the_device_can_not_do_is_refused(tmp_path: Path, override: str, said: list[str]) -> None:
    message = refusal(tmp_path, f"{TYPED} train.steps=1 {override}")
    for words in said:
        assert words in message


# -- targets ---------------------------------------------------------------------------------------


def test_targets_outside_the_allowed_packages_are_refused_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    message = refusal(
        tmp_path,
        [
            *TYPED.split(),
            "model._target_=posix.system",
            f"+model.command='touch {mark}'",
            "data.source._target_=ddptrain.recipes.image.torch.load",
            "optim._target_=ddptrain.verbs.main.os._exit",
        ],
    )
    assert "model._target_=posix.system: not allowed" in message
    assert "data.source._target_=ddptrain.recipes.image.torch.load: " in message
    assert "optim._target_=ddptrain.verbs.main.os._exit: not allowed" in message
    assert not mark.exists()


def test_running_in_the_checkout_allows_no_more_targets() -> None:
    message = refusal(CHECKOUT, f"{TYPED} model._target_=ddptrain.testing.run_ranks")
    assert "model._target_=ddptrain.testing.run_ranks: not allowed" in message


# -- checkpoints and runs --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with a checkpoint of each; tests damage copies of it."""
    folder = tmp_path_factory.mktemp("trained")
    ended = ddptrain(folder, f"{SMALL} checkpoint.every=1 run.dir=run")
    assert ended.code == 0, ended.err
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def flip_a_bit(checkpoint: Path) -> None:
    state = checkpoint / "state.pt"
    payload = bytearray(state.read_bytes())
    payload[len(payload) // 2] ^= 1
    state.write_bytes(payload)


def cut(checkpoint: Path) -> None:
    state = checkpoint / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])


def empty_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text("{}")


def remove_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def remove_the_state(checkpoint: Path) -> None:
    (checkpoint / "state.pt").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip_a_bit, "state.pt does not match its SHA-256"),
        (cut, "were written; it is damaged"),
        (empty_the_manifest, "manifest.json does not match its own SHA-256"),
        (remove_the_manifest, "manifest.json is missing"),
        (remove_the_state, "state.pt is missing"),
    ],
)
def test_a_damaged_checkpoint_that_was_named_is_refused(
    run: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(run / "checkpoints" / "step-2")
    message = refusal(run.parent, f"{SMALL} run.resume=run/checkpoints/step-2")
    assert message.startswith("run/checkpoints/step-2: ")
    assert said in message


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_anew(run: Path) -> None:
    for step in (1, 2):
        flip_a_bit(run / "checkpoints" / f"step-{step}")
    before = (run / "metrics.jsonl").read_bytes()
    ended = ddptrain(run.parent, f"{SMALL} train.steps=3 run.dir=run")
    assert ended.code == 2, ended.err
    assert ended.err.count("ddptrain: ") == 1
    message = ended.err.partition("ddptrain: ")[2]
    assert message.startswith("run/checkpoints: none of its 2 checkpoints can be used.")
    assert "run.resume=never" in message
    assert (run / "metrics.jsonl").read_bytes() == before
    assert (run / "checkpoints" / "step-2" / "state.pt").exists()


@pytest.mark.parametrize(
    ("named", "said"), [("nowhere", "nowhere: does not exist"), ("weights.pt", "weights.pt: is a file")]
)
def test_a_checkpoint_is_a_folder_that_exists(tmp_path: Path, named: str, said: str) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "weights.pt")
    message = refusal(tmp_path, f"{SMALL} run.resume={named}")
    assert said in message
    assert "manifest.json" in message


class Hostile:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self._mark), "w")


def seal(checkpoint: Path) -> None:
    """Give whatever state.pt lies there a manifest that fits it."""
    payload = (checkpoint / "state.pt").read_bytes()
    entry = {"sha256": hashlib.sha256(payload).hexdigest(), "bytes": len(payload)}
    manifest = {"format": FORMAT, "step": 2, "files": {"state.pt": entry}}
    (checkpoint / "manifest.json").write_bytes(sealed(manifest))


def test_a_folder_of_foreign_weights_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "theirs"
    checkpoint.mkdir()
    torch.save({"weight": torch.zeros(3)}, checkpoint / "state.pt")
    message = refusal(tmp_path, f"{SMALL} run.resume=theirs")
    assert message.startswith("theirs: is not a checkpoint of ddptrain")
    seal(checkpoint)
    message = refusal(tmp_path, f"{SMALL} run.resume=theirs")
    assert message.startswith("theirs: state.pt is not a state of ddptrain")


def test_a_hostile_checkpoint_is_refused_and_not_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "theirs"
    checkpoint.mkdir()
    (checkpoint / "state.pt").write_bytes(pickle.dumps(Hostile(tmp_path / "executed")))
    seal(checkpoint)
    message = refusal(tmp_path, f"{SMALL} run.resume=theirs")
    assert message.startswith("theirs: state.pt is not a state of ddptrain")
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_of_another_model_is_refused_and_the_run_stays_as_it_was(run: Path) -> None:
    before = {name: (run / name).read_bytes() for name in ("config.yaml", "command.txt", "metrics.jsonl")}
    message = refusal(run.parent, f"{SMALL} model.width=16 train.steps=3 run.dir=run")
    assert message.startswith("run/checkpoints/step-2: is of another model: ")
    assert " there and " in message
    assert {name: (run / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("evaluate run=run optim.lrr=0.1", ["optim.lrr: ", "Did you mean optim.lr"]),
        ("evaluate run=run data=digts", ["data=digts: ", "Did you mean digits?"]),
        ("evaluate run=run checkpont=best", ["checkpont", "Did you mean checkpoint"]),
        ("evaluate run=run checkpoint=nowhere", ["checkpoint=nowhere: ", "It has best, step-1, step-2."]),
    ],
)
def test_evaluate_refuses_what_does_not_fit_its_run(trained: Path, arguments: str, said: list[str]) -> None:
    message = refusal(trained.parent, arguments)
    for words in said:
        assert words in message


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: [", "config.yaml"), ("- a\n- b\n", "config.yaml"), ("train:\n  epocs: 2\n", "train.epocs")],
)
def test_evaluate_refuses_a_damaged_config(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    message = early_refusal(tmp_path, "evaluate run=.")
    assert said in message


@pytest.mark.parametrize(
    ("size", "words"),
    [(5, "train.micro_batch=2"), pytest.param(8, "strategy=strict", marks=pytest.mark.long)],
)
def test_a_single_value_for_batchnorm_is_no_traceback(tmp_path: Path, size: int, words: str) -> None:
    """Maps of 8 pixels are of one cell at the end of a ResNet."""
    model = "recipe=cnn_digits device=cpu model=torchvision model.name=resnet18"
    message = refusal(tmp_path, f"{model} train.steps=1 run.dir=run train.batch_size={size} {words}")
    assert message.startswith(
        "train.micro_batch: BatchNorm can't normalise a single value a channel (Expected"
    )
    assert (
        f"a pass of rank 0 has 1 of the batch's {size} samples. Let each pass have 2 or more: by" in message
    )


def test_a_run_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    message = refusal(tmp_path, f"{SMALL} run.dir=file/run")
    assert message.startswith("run.dir=file/run: can't be written (Not a directory)")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_run_folder_that_is_read_only_is_named(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    message = refusal(tmp_path, f"{SMALL} run.dir=locked/run")
    assert message.startswith("run.dir=locked/run: can't be written (Permission denied)")


# -- data ------------------------------------------------------------------------------------------

PICTURES = (
    "recipe=cnn_digits device=cpu data=imagefolder data.root=pictures data.source.size=8"
    " data.augment.crop=0 train.batch_size=18 train.steps=1 observers=[console,jsonl,plots]"
)


def draw_pictures(root: Path) -> None:
    """Two classes of ten pictures; the tenth of each is held out."""
    for name in ("cats", "dogs"):
        (root / name).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (16, 16), (i, i, i)).save(root / name / f"{i}.png")


def test_an_image_folder_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    (tmp_path / "picture").mkdir()
    said = refusal(tmp_path, PICTURES)
    assert "data.root=pictures: there is no such folder. Did you mean picture? Name one that holds" in said
    (tmp_path / "pictures" / "cats").mkdir(parents=True)
    message = refusal(tmp_path, PICTURES)
    assert "data.root=pictures: no image found" in message
    assert ".png" in message


@pytest.mark.parametrize(
    ("broken", "loading"),
    [
        ("cats/3.png", "data.resident=true"),
        ("cats/3.png", "data.resident=false data.workers=1"),
        pytest.param("dogs/9.png", "data.resident=false data.workers=1", marks=pytest.mark.long),
    ],
    ids=["resident", "read for training", "read for validation"],
)
def test_a_broken_image_is_named(tmp_path: Path, broken: str, loading: str) -> None:
    draw_pictures(tmp_path / "pictures")
    file = tmp_path / "pictures" / broken
    file.write_bytes(file.read_bytes()[:50])
    message = refusal(tmp_path, f"{PICTURES} {loading}")
    assert message.startswith(f"pictures/{broken}: can't be read as an image")


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/cifar", "no-url"])
def test_cifar10_offline_names_the_file_the_folder_and_a_way_out(tmp_path: Path, url: str) -> None:
    url = url.format(port=closed_port())
    message = refusal(tmp_path, f"recipe=cnn_cifar10 device=cpu data.root=sets +data.source.url={url}")
    assert url in message
    assert "Put cifar-10-binary.tar.gz into sets/" in message
    assert "data=shapes" in message


def test_a_cifar10_archive_with_another_hash_is_named(tmp_path: Path) -> None:
    archive = tmp_path / "sets" / "cifar-10-binary.tar.gz"
    archive.parent.mkdir()
    archive.write_bytes(b"another file")
    message = refusal(tmp_path, "recipe=cnn_cifar10 device=cpu data.root=sets")
    assert message.startswith("sets/cifar-10-binary.tar.gz: its SHA-256 is not")
    assert archive.read_bytes() == b"another file"
