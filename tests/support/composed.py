"""Every recipe, composed as the command line does it, on a few samples that need no download."""

from importlib.resources import files
from pathlib import Path

from masked import mask_set
from texts import write_text

from ddptrain.api.recipe import Data, Task
from ddptrain.api.world import World
from ddptrain.config.check import checked
from ddptrain.config.compose import composed_tree
from ddptrain.config.schema import Config
from ddptrain.run.setup import make_task
from ddptrain.verbs.argv import parse

RECIPES = sorted(
    path.name.removesuffix(".yaml")
    for path in (files("ddptrain.conf") / "recipe").iterdir()
    if path.name != "fit.yaml"  # its model and data are objects
)


def made(recipe: str, folder: Path, *changes: str) -> tuple[Config, Task, Data]:
    """The recipe's config, task and prepared data; ``folder`` is for files."""
    few = ["data.source.train=8", "data.source.valid=4", "data.workers=0"]
    if recipe.startswith("yolo"):
        data = ["data=shapes_detection", *few, "data.source.size=64"]
    elif recipe == "detection":
        data = ["data=shapes_detection", *few, "data.source.size=64", "init.weights=null"]
        data += ["model.name=ssdlite320_mobilenet_v3_large", "model.frozen_norm=false"]
    elif recipe.endswith("_text"):
        data = ["data=text", f"data.source.path={write_text(folder / 'text')}", f"data.root={folder}"]
    elif recipe == "segmentation":
        data = [f"data.root={mask_set(folder / 'masks')}", "data.size=64", "data.workers=0"]
    elif recipe == "supervised":
        data = ["data=shapes", *few, "model._target_=torchvision.models.shufflenet_v2_x0_5"]
        data += ["+model.num_classes=10"]
    elif recipe.endswith("_translate"):
        data = ["data.train=64", "data.valid=8"]
    else:
        data = ["data=shapes", *few]
    found = composed_tree(parse([f"recipe={recipe}", *data, *changes]))
    assert found is not None
    config = checked(found[0])
    task, opened = make_task(config)
    opened.prepare(World(), seed=0)
    return config, task, opened
