"""Detectors of other libraries by the command line: trained, gone on with, asked and exported."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from queries import write_detector
from shell import ddptrain, refusal
from torchvision.models import get_model

from ddptrain.data.detection.run_lengths import decode_masks
from ddptrain.engine.saved_checkpoint import read, unpack
from ddptrain.errors import UserError
from ddptrain.python.load import load

SMALL = (
    "data=shapes_detection data.source.train=24 data.source.valid=8 data.source.size=64 device=cpu"
    " train.batch_size=4 train.steps=6 train.eval_every=3 checkpoint.every=3 log.every=1"
)
SCRATCH = f"recipe=detection {SMALL} init.weights=null model.frozen_norm=false"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def check_it_goes_on(folder: Path, words: str) -> dict[str, float]:
    """The run ends with the same bits if it is killed in step 5 and started again; returns its metrics."""
    whole = folder / "whole"
    shutil.copytree(folder / "run", whole)
    for what in ("step-6", "best"):
        shutil.rmtree(folder / "run/checkpoints" / what)
    done = ddptrain(folder, words, **ONE_THREAD)
    assert done.code == 0, done.err
    assert "plan       steps 3 to 6" in done.err
    again, before = (unpack(read(run / "checkpoints/step-6")) for run in (folder / "run", whole))
    for name, value in before["model"].items():
        assert torch.equal(again["model"][name], value), name
    metrics = [json.loads((run / "summary.json").read_text())["metrics"] for run in (folder / "run", whole)]
    assert metrics[0] == metrics[1]
    last: dict[str, float] = metrics[0]
    return last


def check_python_says_the_same(folder: Path, seen: dict[str, Any], score: float) -> None:
    """`load` and the verb predict, of each picture."""
    with contextlib.chdir(folder):  # where a model of transformers lies
        detector = load("run")
    with pytest.raises(UserError, match=r"score=2"):
        detector.predict(next((folder / "set").rglob("*.png")), score=2)
    for picture in seen["images"]:
        [file] = (folder / "set").rglob(picture["file_name"])
        written = [entry for entry in seen["annotations"] if entry["image_id"] == picture["id"]]
        said = detector.predict(file, score=score)
        assert len(said.boxes) == len(said.scores) == len(said.names) == len(written)
        names = {category["id"]: category["name"] for category in seen["categories"]}
        # pixels are divided by 255 in another place: the last digits differ, and so may the order of two
        # objects with nearly equal scores
        assert said.scores.tolist() == pytest.approx([entry["score"] for entry in written], abs=1e-4)
        boxes = torch.tensor([entry["bbox"] for entry in written]).view(-1, 4)
        found = torch.cat([said.boxes[:, :2], said.boxes[:, 2:] - said.boxes[:, :2]], dim=1)
        scores = torch.tensor([entry["score"] for entry in written])
        alike = (found[:, None] - boxes).abs().amax(2) < 0.05
        alike &= (said.scores[:, None] - scores).abs() < 1e-4
        own_names = np.array([names[entry["category_id"]] for entry in written])
        alike &= torch.from_numpy(np.array(said.names)[:, None] == own_names)
        # of nearly equal ones rounding may also decide which are the last of the most confident
        for dim in (0, 1):
            assert (~alike.any(dim)).sum() <= 0.1 * len(written)
        if said.masks is not None:
            masks = [entry["segmentation"]["counts"].encode() for entry in written]
            own = decode_masks(masks, *said.masks.shape[1:])[alike.int().argmax(1)]
            assert (said.masks != own).float().mean() < 0.01


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    ["model.name=ssdlite320_mobilenet_v3_large", "model=transformers_detection model.name=d_fine"],
)
def test_from_the_first_step_to_a_file(model: str, tmp_path: Path) -> None:
    write_detector("d_fine", tmp_path / "d_fine")
    words = f"{SCRATCH} {model} run.dir=run"
    done = ddptrain(tmp_path, words, **ONE_THREAD)
    assert done.code == 0, done.err
    check_it_goes_on(tmp_path, words)

    done = ddptrain(
        tmp_path,
        "write recipe=yolo_shapes data.source.train=1 data.source.valid=1 data.source.size=64 out=set",
    )
    assert done.code == 0, done.err
    done = ddptrain(tmp_path, "predict run=run source=set out=seen score=0.001", **ONE_THREAD)
    assert done.code == 0, done.err
    seen = json.loads((tmp_path / "seen/predictions.json").read_text())
    assert len(seen["images"]) == 2
    check_python_says_the_same(tmp_path, seen, score=0.001)
    done = ddptrain(tmp_path, "export run=run format=onnx score=0.001", **ONE_THREAD)
    assert done.code == 0, done.err
    assert "checked    against eager" in done.err
    every = "export run=run format=pt2 nms=false"
    if "ssd" in model:
        assert "checked    against eager" in ddptrain(tmp_path, every, **ONE_THREAD).err
    else:
        assert "nms=false: this detector has no anchors" in refusal(tmp_path, every, **ONE_THREAD)


@pytest.mark.long
def test_masks_from_the_first_step_to_a_prediction(tmp_path: Path) -> None:
    few = "+model.box_detections_per_img=10 +model.box_batch_size_per_image=16"
    few += " +model.rpn_post_nms_top_n_train=50 +model.rpn_post_nms_top_n_test=50"
    words = f"{SCRATCH} model.name=maskrcnn_resnet50_fpn data.source.masks=true {few} run.dir=run"
    done = ddptrain(tmp_path, words, **ONE_THREAD)
    assert done.code == 0, done.err
    assert "24 train with" in done.err
    assert " masks, 8 valid" in done.err
    assert "mask_mAP" in done.err
    assert (tmp_path / "run/plots").is_dir()
    metrics = check_it_goes_on(tmp_path, words)
    assert {"mask_mAP", "mask_mAP50", "mask_mAP75", "mask_AR"} <= metrics.keys()

    set_words = "data.source.train=1 data.source.valid=1 data.source.size=64 data.source.masks=true"
    line = f"write recipe=yolo_shapes {set_words} layout=coco out=set"
    done = ddptrain(tmp_path, line)
    assert done.code == 0, done.err
    done = ddptrain(tmp_path, "predict run=run source=set out=seen score=0.06", **ONE_THREAD)
    assert done.code == 0, done.err
    seen = json.loads((tmp_path / "seen/predictions.json").read_text())
    assert len(seen["images"]) == 2
    assert all(entry["segmentation"]["size"] == [64, 64] for entry in seen["annotations"])
    check_python_says_the_same(tmp_path, seen, score=0.06)
    assert len(list((tmp_path / "seen/pictures").rglob("*.png"))) == 2
    assert "export: a file would give boxes alone" in refusal(
        tmp_path, "export run=run format=onnx", **ONE_THREAD
    )


@pytest.mark.long
def test_it_starts_from_the_librarys_weights(tmp_path: Path) -> None:
    """From a file of them, as without a network."""
    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    weights = get_model(name, weights=None, weights_backbone=None, num_classes=91).state_dict()
    for key in weights:
        if key.endswith("running_mean"):
            weights[key] += 0.1
        if key.startswith("rpn.head"):
            weights[key] *= 100  # so that rounding does not decide which proposals are the best
    torch.save(weights, tmp_path / "coco.pth")
    words = f"recipe=detection {SMALL} model.name={name} init.weights=coco.pth run.dir=run train.steps=1"
    done = ddptrain(tmp_path, words, **ONE_THREAD)
    assert done.code == 0, done.err
    assert "4 left out, of another size, so random: detector.roi_heads.box_predictor" in done.err
    assert "so random: detector.backbone" not in done.err
    for kind in ("onnx", "pt2"):
        done = ddptrain(tmp_path, f"export run=run format={kind} score=0.01", **ONE_THREAD)
        assert done.code == 0, done.err
        assert "checked    against eager" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.name=fasterrcnn_resnet50", "model.name=fasterrcnn_resnet50: there is no such model."),
        ("model.name=keypointrcnn_resnet50_fpn", "learns keypoints, which the data do not have"),
        ("model.name=maskrcnn_resnet50_fpn", "learns masks, and the data have boxes alone. Add data.source"),
        ("model=transformers_detection", "model.name: name a detector of the Hugging Face hub"),
        (
            "model=transformers_detection model.name=nowhere/at_all",
            "model.name=nowhere/at_all: can't be built",
        ),
        (
            "model.name=ssdlite320_mobilenet_v3_large init.weights=null",
            "model.frozen_norm=true: the norms have no statistics",
        ),
        (
            "model.name=ssdlite320_mobilenet_v3_large +model.score_tresh=0.1",
            "model.score_tresh: SSD has no such argument. Did you mean score_thresh?",
        ),
        ("model.name=fcos_resnet50_fpn +model.min_size=800", "model.min_size: data.size says how large"),
    ],
)
def test_a_mistake_is_one_message(words: str, said: str, tmp_path: Path) -> None:
    more = "" if "init" in words else " init.weights=null"
    line = f"recipe=detection {SMALL} {words}{more}"
    assert said in refusal(tmp_path, line, HF_HUB_OFFLINE="1", **ONE_THREAD)
