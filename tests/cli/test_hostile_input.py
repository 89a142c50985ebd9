"""A stranger's config: nothing it says is executed, read from the environment, or written where it likes.

Its YAML: tests/cli/test_hostile_yaml.py. Checkpoints and archives: tests/cli/test_hostile_files.py.
"""

from pathlib import Path
from typing import Any

import pytest
from hostile import EVIL, RECIPE, Place, saved

TOUCH = {"_target_": "os.system", "command": "touch CANARY"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, monkeypatch, capsys)


# -- targets ---------------------------------------------------------------------------------------

PICKLE = "THEIRS/payload.pkl"
TARGETS: dict[str, dict[str, Any]] = {
    "os.system": {"command": "touch CANARY"},
    "posix.system": {"command": "touch CANARY"},
    "os._exit": {"status": 0},
    "os.mkdir": {"path": "CANARY"},
    "torch.load": {"f": PICKLE, "weights_only": False},
    "torch.hub.load": {"repo_or_dir": "THEIRS", "model": "evil", "source": "local"},
    "torch.hub.download_url_to_file": {"url": "file://THEIRS/payload.pkl", "dst": "CANARY"},
    "torch.utils.collect_env.run": {"command": "touch CANARY"},
    "numpy.load": {"file": PICKLE, "allow_pickle": True},
    "builtins.open": {"file": "CANARY", "mode": "w"},
    "builtins.exec": {"source": "open('CANARY', 'w')"},
    "pathlib.Path.write_text": {"self": "CANARY", "data": ""},
    "pathlib.Path.touch": {"self": "CANARY"},
    "shutil.copyfile": {"src": PICKLE, "dst": "CANARY"},
    "subprocess.run": {"args": ["touch", "CANARY"]},
    "runpy.run_path": {"path_name": "THEIRS/hubconf.py"},
    "logging.FileHandler": {"filename": "CANARY"},
    "hydra.utils.instantiate": {"config": TOUCH},
    "ddptrain.verbs.main.main": {"words": ["write", "recipe=yolo_shapes", "out=CANARY"]},
    "ddptrain.testing.run_ranks": {"fn": TOUCH, "size": 1},
    "ddptrain.recipes.cnn.os.system": {"command": "touch CANARY"},
    "ddptrain.recipes.image.torch.load": {"f": PICKLE, "weights_only": False},
    "ddptrain.recipes.image.torch.hub.load": {"repo_or_dir": "THEIRS", "model": "evil", "source": "local"},
    "ddptrain.recipes.detection.predict.predicted": {"source": "THEIRS", "out": "CANARY"},
    "ddptrain.data.download.download": {"url": "x", "sha256": "x", "target": "CANARY", "limits": None},
    "ddptrain.data.download.urllib.request.urlretrieve": {"url": "file://THEIRS/payload.pkl"},
    "ddptrain.data.detection.write.claim": {"folder": "CANARY"},
    "torch.nn.modules.module.torch.load": {"f": PICKLE, "weights_only": False},
    "torch.nn.modules.module.functools.partial": {"func": TOUCH},
    "torch.nn.Module.load_state_dict": {"self": {}},
    "torch.nn.Linear.__init__.__globals__": {},
    "torch.nn..Linear": {"in_features": 1, "out_features": 1},
    "torch.nn." + ".".join("a" * 60): {},
    "torch.optim.optimizer.torch.load": {"f": PICKLE, "weights_only": False},
    "torch.optim.lr_scheduler.LambdaLR": {"optimizer": TOUCH, "lr_lambda": TOUCH},
    "torchvision.models.get_model": {"name": "resnet18", "weights": "DEFAULT"},
    "torchvision.models.feature_extraction.create_feature_extractor": {"model": TOUCH},
    "torchvision.models._api.WeightsEnum.get_state_dict": {"self": {"url": "file://THEIRS/payload.pkl"}},
    "torchvision.models.resnet18": {"weights": "DEFAULT"},
    "torchvision.models.vgg11": {"pretrained": True},
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_that_is_not_on_the_list_is_not_called(place: Place, target: str) -> None:
    run = place.run_of({"model": {"_target_": target, **TARGETS[target]}})
    message = place.refused(["evaluate", f"run={run}"])
    assert message.startswith("model.")
    assert target in message or "download a file and unpickle it" in message


def changed(path: str, value: Any) -> dict[str, Any]:
    """The saved config with a value put in where the dotted path says."""
    tree = saved()
    *sections, last = path.split(".")
    inside = tree
    for section in sections:
        inside = inside.setdefault(section, {})
    inside[last] = value
    return tree


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("task", TOUCH),
        ("model", TOUCH),
        ("data", TOUCH),
        ("optim", TOUCH),
        ("data.source", TOUCH),
        ("data.augment", TOUCH),
        ("task.model", TOUCH),
        ("model.width", TOUCH),
        ("optim.betas", [TOUCH, TOUCH]),
        ("optim.betas", [0.9, [{"a": TOUCH}]]),
        ("optim.foreach", {"a": {"b": TOUCH}}),
        ("optim.params", [TOUCH]),
        ("data.source", {"_target_": "torch.nn.Sequential", "args": [TOUCH]}),
        ("model", {"_target_": "torchvision.models.resnet18", "norm_layer": TOUCH}),
        ("model", {"_target_": "torchvision.models.resnet18", "anything": [{"a": [TOUCH]}]}),
        ("sched", TOUCH),
        ("train", TOUCH),
        ("ema.decay", TOUCH),
        ("hydra.callbacks.x", TOUCH),
        ("task.1", TOUCH),
    ],
)
def test_no_place_of_a_config_takes_such_a_node(place: Place, path: str, value: Any) -> None:
    run = place.run_of(changed(path, value))
    message = place.refused(["evaluate", f"run={run}"])
    assert path.split(".")[0] in message


@pytest.mark.parametrize(
    ("path", "node", "said"),
    [
        ("data.source", {"_target_": "ddptrain.recipes.cnn.SmallCnn", "num_classes": 1, "in_channels": 1,
                         "image_size": [8, 8]}, "must make ImageSource"),
        ("data.augment", {"_target_": "ddptrain.data.images.digits.Digits"}, "must make Augment"),
        ("model", {"_target_": "torchvision.models.resnet18", "weights": "IMAGENET1K_V1"}, "unpickle"),
    ],
)  # fmt: skip
def test_a_node_of_another_kind_is_refused_before_it_is_built(
    place: Place, path: str, node: dict[str, Any], said: str
) -> None:
    run = place.run_of(changed(path, node))
    assert said in place.refused(["evaluate", f"run={run}"])


# -- Hydra's own keys ------------------------------------------------------------------------------

CALLBACK = "{x: {_target_: logging.FileHandler, filename: CANARY}}"
LOGGING = "{version: 1, root: {handlers: [f]}, handlers: {f: {class: logging.FileHandler, filename: CANARY}}}"
FACTORY = (
    "{version: 1, root: {handlers: [f]}, handlers: {f: {(): shutil.copyfile, src: /dev/null, dst: CANARY}}}"
)


@pytest.mark.parametrize(
    "lines",
    [
        f"hydra: {{callbacks: {CALLBACK}}}",
        f"hydra: {{job_logging: {LOGGING}}}",
        f"hydra: {{job_logging: {FACTORY}}}",
        f"hydra: {{hydra_logging: {LOGGING}}}",
        "hydra: {launcher: {_target_: os.system, command: touch CANARY}}",
        "hydra: {sweeper: {_target_: os.system, command: touch CANARY}}",
        "hydra: {sweeper: {params: {model.width: '8,16'}}}",
        "hydra: {run: {dir: CANARY}, output_subdir: x}",
        "hydra: {sweep: {dir: CANARY}}",
        "hydra: {output_subdir: ../../canary}",
        "hydra: {job: {env_set: {LD_PRELOAD: THEIRS/x.so}}}",
        "hydra: {job: {env_copy: [SECRET]}}",
        "hydra: {job: {env_copy: [NOT_SET]}}",
        "hydra: {job: {chdir: true}}",
        "hydra: {searchpath: [pkg://antigravity]}",
        "hydra: {mode: MULTIRUN}",
        "hydra.callbacks: {}",
    ],
)
def test_a_recipe_sets_none_of_hydras_keys(place: Place, lines: str) -> None:
    place.recipe(RECIPE + lines)
    assert "theirs/recipe/evil.yaml: sets keys of Hydra's own" in place.refused(EVIL)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("recipe/evil", f"# @package hydra.callbacks\nx: {CALLBACK[4:-1]}"),
        ("recipe/evil", f"# @package _global_.hydra\ncallbacks: {CALLBACK}"),
        ("recipe/evil", "defaults:\n  - /model@hydra.callbacks: cnn"),
        ("recipe/evil", "defaults:\n  - override /hydra/launcher: basic"),
        ("recipe/evil", "defaults:\n  - /hydra/job_logging: [default]"),
        ("hydra/callbacks/evil", f"x: {CALLBACK[4:-1]}"),
        ("recipe/hydra", f"# @package _name_\ncallbacks: {CALLBACK}"),
    ],
)
def test_no_package_or_default_leads_to_hydras_keys(place: Place, name: str, text: str) -> None:
    place.recipe("defaults:\n  - /hydra/callbacks/evil\n" if name.startswith("hydra") else text)
    place.recipe(text, name)
    recipe = name.removeprefix("recipe/") if name.startswith("recipe") else "evil"
    assert "Hydra's own" in place.refused(["--config-dir=THEIRS", f"recipe={recipe}"])


@pytest.mark.parametrize(
    "words",
    [
        [f"+hydra.callbacks={CALLBACK}"],
        [f"++hydra.callbacks={CALLBACK}"],
        [f"hydra.job_logging={LOGGING}"],
        ["hydra.run.dir=CANARY", "hydra.output_subdir=x"],
        ["hydra.job.env_set={A: b}"],
        ["hydra.launcher._target_=os.system", "--multirun"],
        ["hydra.launcher={_target_: os.system}", "--multirun"],
        ["+hydra.launcher.x={_target_: os.system}", "--multirun"],
        ["hydra.sweeper.x={a: [{_target_: os.system}]}", "--multirun"],
        ["hydra/launcher@hydra.callbacks=basic", "--multirun"],
        ["hydra/launcher=THEIRS/x", "--multirun"],
        ["~hydra/launcher", "--multirun"],
        ["hydra/job_logging=default"],
        ["hydra={callbacks: {}}"],
        ["~hydra"],
        ["+hydra.searchpath=[THEIRS]"],
        ["hydra.mode=MULTIRUN"],
        ["+recipe@hydra.callbacks=cnn_digits"],
        ["hydra.searchpath=THEIRS"],
        ["hydra.searchpath=[http://127.0.0.1/x]"],
        ["hydra.searchpath=[structured://os]"],
        ["--experimental-rerun=THEIRS/payload.pkl"],
        ["--config-name=THEIRS/recipe/evil"],
        ["--config-path=THEIRS"],
    ],
)
def test_the_command_line_sets_none_of_hydras_keys_that_start_code(place: Place, words: list[str]) -> None:
    message = place.refused(["recipe=cnn_digits", "device=cpu", "run.resume=nowhere", *words])
    assert "nowhere: does not exist" not in message


def test_a_searchpath_finds_recipes_and_opens_no_code(place: Place) -> None:
    place.recipe(RECIPE + "train: {epocs: 1}")
    word = "hydra.searchpath=[THEIRS]"
    assert "epocs" in place.refused([word, "recipe=evil"])
    place.recipe(RECIPE + "optim: {_target_: hubconf.Evil}")
    assert "optim._target_=hubconf.Evil: not allowed" in place.refused([word, "recipe=evil", "device=cpu"])
