"""The door from a config node to an object: what it lets through, and how it says what it does not."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddptrain.config.instantiate import build, check_node
from ddptrain.config.search_path import open_user_code
from ddptrain.config.targets import open_package, packages_restored, resolve
from ddptrain.data.images.augment import Augment
from ddptrain.errors import UserError
from ddptrain.recipes.cnn import SmallCnn

LINEAR = {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2}
SEQUENCE = {"_target_": "torch.nn.Sequential"}
IMAGES = {
    "_target_": "ddptrain.data.images.data.ImageData",
    "source": {"_target_": "ddptrain.data.images.digits.Digits"},
    "augment": {"_target_": "ddptrain.data.images.augment.Augment", "crop": 1},
}

HOSTILE = [
    "os.system",
    "posix.system",
    "torchvision.models._api.WeightsEnum.get_state_dict",  # a method: would take any node as its self
    "torchvision.models.WeightsEnum.get_state_dict",
    "torchvision.models.ResNet.load_state_dict",
    "builtins.eval",
    "subprocess.run",
    "torch.load",
    "torch.hub.load",
    "ddptrain.verbs.main.os._exit",
    "ddptrain.verbs.main.main",
    "ddptrain.testing.run_ranks",
    "ddptrain.recipes.image.torch.load",
    "ddptrain.recipes.image.functional.torch.hub.load",
    "ddptrain.data.images.cifar10.urllib.request.urlretrieve",
    "ddptrain.data.images.cifar10.tarfile.TarFile",
    "ddptrain.data.workers.multiprocessing.Process",
    "torch.nn.modules.module.torch.load",
    "torch.nn.modules.module.functools.partial",
    "torch.nn.Linear.__class__",
    "torch.nn.Linear.__init__.__globals__",
    "torch.nn.Module.load_state_dict",
    "torchvision.models._api.os.system",
    "ddptrain",
    "",
]


@pytest.mark.parametrize("target", HOSTILE)
def test_a_target_outside_the_allowed_names_is_refused_as_written_and_as_resolved(target: str) -> None:
    node = {"_target_": target}
    assert len(check_node(node, "model")) == 1
    with pytest.raises(UserError, match=r"^model\._target_="):
        build(node, "model")


def test_a_refused_target_is_not_called(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    with pytest.raises(UserError):
        build({"_target_": "os.mkdir", "path": str(mark)}, "model")
    with pytest.raises(UserError):
        build({**IMAGES, "source": {"_target_": "os.mkdir", "path": str(mark)}}, "data")
    assert not mark.exists()


@pytest.mark.parametrize("target", [None, 3, ["torch.nn.Linear"]])
def test_a_target_is_a_name(target: Any) -> None:
    with pytest.raises(UserError, match=r"^model\._target_: needs the dotted name of a class"):
        build({"_target_": target}, "model")


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("torch.optim.Adm", "Adam"),
        ("ddptrain.recipes.cnn.SmalCnn", "SmallCnn"),
        ("ddptrain.data.imags.ImageData", "images"),
    ],
)
def test_a_misspelt_target_is_answered_with_the_right_name(target: str, meant: str) -> None:
    (problem,) = check_node({"_target_": target}, "model")
    assert problem.startswith(f"model._target_={target}: ")
    assert f"Did you mean {meant}" in problem


@pytest.mark.parametrize(
    "module", ["torch.nn", "torch.nn.attention", "torch.nn.parameter", "torch.optim.lr_scheduler"]
)
def test_checking_any_name_answers_instead_of_raising(module: str) -> None:
    for name in vars(importlib.import_module(module)):
        check_node({"_target_": f"{module}.{name}"}, "model")


def test_an_abstract_class_is_refused() -> None:
    node = {"_target_": "ddptrain.data.images.source.ImageSource"}
    (problem,) = check_node(node, "data.source")
    assert problem.startswith("data.source._target_=ddptrain.data.images.source.ImageSource: ")
    with pytest.raises(UserError):
        build(node, "data.source")


def test_a_right_node_has_no_problem_and_builds() -> None:
    assert check_node(LINEAR, "model") == []
    layer = build(LINEAR, "model")
    assert isinstance(layer, nn.Linear)
    assert layer.weight.shape == (2, 3)


def test_nested_nodes_are_checked_with_their_full_key_and_built() -> None:
    assert check_node(IMAGES, "data") == []
    data = build(IMAGES, "data")
    assert type(data).__name__ == "ImageData"
    wrong = {**IMAGES, "augment": {**IMAGES["augment"], "crap": 1}}
    assert check_node(wrong, "data") == [
        "data.augment.crap: ddptrain.data.images.augment.Augment takes no such argument."
        " Did you mean data.augment.crop?"
    ]


@pytest.mark.parametrize(
    ("target", "arguments", "problem"),
    [
        ("ddptrain.data.images.augment.Augment", {"crop": 1.5}, "k.crop=1.5: must be a whole number."),
        ("ddptrain.data.images.augment.Augment", {"crop": True}, "k.crop=True: must be a whole number."),
        ("ddptrain.data.images.augment.Augment", {"crop": None}, "k.crop=None: must be a whole number."),
        (
            "ddptrain.data.images.augment.Augment",
            {"horizontal_flip": 1},
            "k.horizontal_flip=1: must be true or false or alternate.",
        ),
        (
            "ddptrain.data.images.augment.Augment",
            {"horizontal_flip": "yes"},
            "k.horizontal_flip=yes: must be true or false or alternate.",
        ),
        ("ddptrain.data.images.cifar10.Cifar10", {"url": 3}, "k.url=3: must be text."),
        ("torch.nn.Dropout", {"p": "half"}, "k.p=half: must be a finite number."),
        (
            "torch.nn.CrossEntropyLoss",
            {"weight": "half"},
            "k.weight=half: must be null or keys with a _target_ (Tensor).",
        ),
        ("torch.nn.Dropout", {"p": float("nan")}, "k.p=nan: must be a finite number."),
        ("torch.nn.Dropout", {"p": float("inf")}, "k.p=inf: must be a finite number."),
        ("torch.nn.Dropout", {"p": True}, "k.p=True: must be a finite number."),
    ],
)
def test_an_argument_of_the_wrong_type_is_named(target: str, arguments: dict[str, Any], problem: str) -> None:
    assert check_node({"_target_": target, **arguments}, "k") == [problem]


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("torch.nn.Dropout", {"p": 0}),
        ("torch.optim.AdamW", {"lr": 1, "betas": [0.9, 0.95], "fused": None}),
        ("ddptrain.recipes.classifiers.torchvision_classifier", {"name": "mobilenet_v3_large"}),
        ("torchvision.models.resnet18", {"num_classes": 10}),
    ],
)
def test_an_argument_of_a_right_type_is_let_through(target: str, arguments: dict[str, Any]) -> None:
    assert check_node({"_target_": target, **arguments}, "k", offered=None) == []


@pytest.mark.parametrize("betas", [[0.9], 0.9, ["a", "b"]])
def test_a_tuple_has_its_length_and_types(betas: Any) -> None:
    (problem,) = check_node({"_target_": "torch.optim.AdamW", "betas": betas}, "optim", offered=None)
    assert problem.startswith(f"optim.betas={betas}: must be ")


@pytest.mark.parametrize("name", ["_partial_", "_args_", "_convert_", "_recursive_"])
def test_hydras_other_keys_have_no_meaning(name: str) -> None:
    problem = f"model.{name}: only _target_ has a meaning here; remove it."
    assert check_node({**LINEAR, name: True}, "model") == [problem]


def test_a_missing_argument_is_named_unless_it_is_offered() -> None:
    node = {"_target_": "torch.nn.Linear", "in_features": 3}
    assert check_node(node, "model") == [
        "model.out_features: torch.nn.Linear needs it; set model.out_features=..."
    ]
    assert check_node(node, "model", offered=("out_features",)) == []
    assert check_node(node, "model", offered=None) == []


def test_offered_arguments_go_where_they_have_a_name_and_never_beat_the_node() -> None:
    node = {"_target_": "ddptrain.recipes.cnn.SmallCnn", "width": 4, "num_classes": 7}
    model = build(node, "model", num_classes=10, in_channels=1, image_size=(8, 8), nonsense=1)
    assert isinstance(model, SmallCnn)
    assert model.conv1.out_channels == 4
    assert model.fc2.out_features == 7


def test_a_value_that_the_target_refuses_is_the_users_error_and_names_the_section() -> None:
    with pytest.raises(UserError, match=r"^model \(torch\.nn\.Dropout\): .*probability"):
        build({"_target_": "torch.nn.Dropout", "p": 2}, "model")
    with pytest.raises(UserError, match=r"^data\.augment\.crop=-1: must be 0 or more"):
        build({"_target_": "ddptrain.data.images.augment.Augment", "crop": -1}, "data.augment")
    with pytest.raises(UserError, match=r"^optim .*learning rate"):
        build({"_target_": "torch.optim.SGD", "lr": -1}, "optim", params=[nn.Parameter(torch.zeros(1))])


def test_a_misspelt_argument_behind_keyword_arguments_is_the_users_error_too() -> None:
    with pytest.raises(UserError, match="num_clases"):
        build({"_target_": "torchvision.models.resnet18", "num_clases": 3}, "model")


def test_an_opened_package_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_own_module.py").write_text("def double(of: int) -> int:\n    return 2 * of\n")
    monkeypatch.syspath_prepend(tmp_path)
    node = {"_target_": "users_own_module.double", "of": 21}
    with pytest.raises(UserError, match="not allowed"):
        build(node, "model")
    open_package("users_own_module")
    assert check_node(node, "model") == []
    assert build(node, "model") == 42


ANNOTATIONS = """
from collections.abc import Callable, Sized
from typing import Any, Protocol
from torch import nn

class Counts(Protocol):
    def __len__(self) -> int: ...

"""


def own_function(folder: Path, monkeypatch: pytest.MonkeyPatch, annotation: str, returned: str) -> str:
    """The name of a function of one argument, ``of``, in an opened package."""
    module = f"users_{abs(hash((annotation, returned)))}"
    (folder / f"{module}.py").write_text(f"{ANNOTATIONS}def own(of: {annotation}): return {returned}")
    monkeypatch.syspath_prepend(folder)
    open_package(module)
    return f"{module}.own"


@pytest.mark.parametrize(
    ("annotation", "fits"),
    [
        ("Any", True),
        ("object", True),
        ("Counts", True),
        ("Sized", True),
        ("Counts | None", True),
        ("int", False),
    ],
)
def test_what_is_offered_is_compared_with_the_annotation_as_far_as_it_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, annotation: str, fits: bool
) -> None:
    node = {"_target_": own_function(tmp_path, monkeypatch, annotation, "len(of)")}
    if fits:
        assert build(node, "task", of=[1, 2]) == 2
        return
    with pytest.raises(UserError, match=r"own needs int as its of, not list\. Choose another of="):
        build(node, "task", of=[1, 2])


@pytest.mark.parametrize(
    ("annotation", "fits"),
    [
        ("Any", True),
        ("object", True),
        ("nn.Module", True),
        ("nn.Module | None", True),
        ("Callable[..., Any]", True),
        ("Callable[..., Any] | None", True),
        ("Sized", True),
        ("Counts", True),
        ("nn.Conv2d", False),
        ("int", False),
        ("nn.Conv2d | str", False),
    ],
)
def test_a_nested_node_makes_what_its_argument_is_annotated_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, annotation: str, fits: bool
) -> None:
    function = own_function(tmp_path, monkeypatch, annotation, "of")
    node = {"_target_": function, "of": LINEAR if annotation not in ("Sized", "Counts") else SEQUENCE}
    if fits:
        assert check_node(node, "model") == []
        assert isinstance(build(node, "model"), nn.Module)
        return
    (problem,) = check_node(node, "model")
    assert problem.startswith("model.of._target_=torch.nn.Linear: must make ")
    with pytest.raises(UserError, match=r"^model\.of\._target_=torch\.nn\.Linear: must make "):
        build(node, "model")


def test_a_list_of_nodes_becomes_a_list_of_what_they_make() -> None:
    node = {"_target_": "torch.nn.ModuleList", "modules": [LINEAR, LINEAR]}
    assert check_node(node, "model") == []
    assert [type(made).__name__ for made in build(node, "model")] == ["Linear", "Linear"]


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        (
            {"_target_": "torch.nn.ModuleList", "modules": [LINEAR, {"_target_": "os.sep"}]},
            "model.modules[1]",
        ),
        ({"_target_": "torch.nn.ModuleList", "modules": [{"_target_": "os.system"}]}, "model.modules[0]"),
        ({"_target_": "torch.nn.ModuleList", "modules": [{**LINEAR, "size": 1}]}, "model.modules[0].size"),
        ({"_target_": "torch.nn.Linear", "in_features": [LINEAR], "out_features": 2}, "model.in_features"),
    ],
)
def test_nodes_in_a_list_are_checked_as_others_are(node: dict[str, Any], problem: str) -> None:
    (found,) = check_node(node, "model")
    assert found.startswith(problem)
    with pytest.raises(UserError, match=r"^model"):
        build(node, "model")


CROP = {"_target_": "torchvision.transforms.v2.RandomHorizontalFlip", "p": 0.5}


@pytest.mark.parametrize(
    ("transforms", "problem"),
    [
        ({"a": {"_target_": "os.system"}}, "k.transforms.a._target_="),
        ({"a": CROP, "b": {**CROP, "q": 1}}, "k.transforms.b.q: "),
        ({"a": CROP, "b": 3}, "k.transforms.b=3: must be null or keys with a _target_ (Module)"),
        ({"a": [CROP]}, "k.transforms.a"),
        ({"a": {"b": CROP}}, "k.transforms.a"),
        ({"a": {"_target_": "ddptrain.data.images.augment.Augment"}}, "k.transforms.a._target_="),
    ],
)
def test_nodes_in_a_mapping_are_checked_as_others_are(transforms: dict[str, Any], problem: str) -> None:
    node = {"_target_": "ddptrain.data.images.transforms.Transforms", "transforms": transforms}
    assert any(text.startswith(problem) for text in check_node(node, "k"))
    good = {**node, "transforms": {"flip": CROP, "off": None}}
    assert not check_node(good, "k")
    built = build(good, "k").transforms
    assert type(built["flip"]).__name__ == "RandomHorizontalFlip"
    assert built["off"] is None


@pytest.mark.parametrize(
    "value", [[{"a": LINEAR}], {"a": LINEAR}, {"a": [{"b": LINEAR}]}, {"a": [LINEAR]}, [[LINEAR]]]
)
def test_a_node_where_nothing_would_be_built_of_it_is_refused(value: Any) -> None:
    node = {"_target_": "torch.nn.ModuleList", "modules": value}
    (problem,) = check_node(node, "model")
    assert problem.startswith("model.modules")
    assert problem.endswith("a node can only be an argument itself, or in a list that is one; move it.")
    with pytest.raises(UserError, match="a node can only be an argument itself"):
        build(node, "model")


@pytest.mark.parametrize(
    "target",
    [
        "torch.optim.lr_scheduler.StepLR",
        "torch.nn.Parameter",
        "torch.nn.ParameterList.extend",
        "torchvision.models.get_model",
        "torchvision.models.ResNet18_Weights",
        "ddptrain.recipes.detection.draw.compared",
    ],
)
def test_of_a_library_only_what_a_model_is_made_of_is_built(target: str) -> None:
    assert check_node({"_target_": target}, "model", offered=None)


@pytest.mark.parametrize("arguments", [{"norm_layer": "x"}, {"width_per_group": "x"}, {"layers": [1]}])
def test_what_a_library_makes_of_wrong_arguments_is_the_users_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^model \(torchvision\.models\.resnet18\): "):
        build({"_target_": "torchvision.models.resnet18", **arguments}, "model")


def test_an_opened_package_is_no_way_to_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_other_module.py").write_text("import os\nimport torch\nfrom shutil import rmtree\n")
    monkeypatch.syspath_prepend(tmp_path)
    open_package("users_other_module")
    for name in ("os.system", "torch.load", "rmtree"):
        with pytest.raises(UserError, match=r"^model\._target_=users_other_module\."):
            build({"_target_": f"users_other_module.{name}"}, "model")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("ddptrain.recipe.cnn.SmallCnn", "ddptrain.recipes.cnn.SmallCnn"),
        ("torchvison.models.resnet18", "torchvision.models.resnet18"),
        ("torchvision.model.resnet18", "torchvision.models.resnet18"),
        ("torch.optin.Adam", "torch.optim.Adam"),
        ("users_third_modul.Net", "users_third_module.Net"),
        ("ddptrain.recipes.cn.SmallCnn", "cnn"),
    ],
)
def test_a_misspelt_module_is_told_by_the_one_that_was_meant(written: str, meant: str) -> None:
    open_package("users_third_module")
    with pytest.raises(UserError) as refused:
        build({"_target_": written}, "model")
    assert str(refused.value).startswith(f"model._target_={written}: ")
    assert str(refused.value).endswith(f" Did you mean {meant}?")


def test_a_name_in_the_place_of_a_node_is_told_what_belongs_there() -> None:
    (problem,) = check_node({**IMAGES, "augment": "cutout"}, "data", offered=None)
    assert problem.startswith("data.augment=cutout: must be keys with a _target_ (Augment, Transforms, ")


def test_equal_nodes_build_equal_objects() -> None:
    node = {"_target_": "ddptrain.data.images.augment.Augment", "crop": 2, "horizontal_flip": True}
    assert build(node, "augment") == build(node, "augment") == Augment(crop=2, horizontal_flip=True)


def test_a_module_of_another_folder_is_not_taken_for_the_one_that_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs with code of their own are loaded by one program."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    node = {"_target_": "of_two_folders.Net"}
    for name, size in (("a", 2), ("b", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "of_two_folders.py").write_text(
            f"from torch import nn\nclass Net(nn.Linear):\n  def __init__(self): super().__init__({size}, 1)"
        )
    for _ in range(2):
        with packages_restored():
            open_user_code([tmp_path / "a"])
            assert build(node, "model").in_features == 2
    with packages_restored():
        open_user_code([tmp_path / "b"])
        with pytest.raises(
            UserError, match=r"of_two_folders is imported from .*a/of_two_folders\.py already"
        ):
            build(node, "model")
    with pytest.raises(UserError, match="not allowed"):
        build(node, "model")


def test_trust_ends_with_the_call_that_it_was_given_to() -> None:
    node = {"_target_": "optuna.Study"}
    with packages_restored():
        open_user_code([], ["optuna"])
        assert resolve(node, "model").__name__ == "Study"
    with pytest.raises(UserError, match="not allowed"):
        resolve(node, "model")
