"""Wrong words of every kind and for every verb: one message that names them, exit code 2, before torch is
imported wherever they can be known by then. Through real command lines, a few: tests/cli/test_bad_input.py.
"""

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

TYPED = "recipe=cnn_digits device=cpu"

TYPOS = {
    **{f"train.{wrong}=1": f"train.{right}" for wrong, right in {
        "epocs": "epochs", "batchsize": "batch_size", "micro_bach": "micro_batch", "stepps": "steps",
        "eval_evry": "eval_every", "evalbatch_size": "eval_batch_size", "clip_nrom": "clip_norm",
        "weight_decay_onn": "weight_decay_on",
    }.items()},
    **{f"sched.{wrong}=1": f"sched.{right}" for wrong, right in {
        "warmpu": "warmup", "fnal": "final",
    }.items()},
    **{f"strategy.{wrong}=1": f"strategy.{right}" for wrong, right in {
        "bucket_cap": "bucket_cap_mb", "gradient_bucket_view": "gradient_as_bucket_view",
        "static_grap": "static_graph", "compresion": "compression", "sync_batch_norm": "sync_batchnorm",
    }.items()},
    "ema.deacy=0.9": "ema.decay",
    "checkpoint.evry=1": "checkpoint.every",
    "checkpoint.kep=1": "checkpoint.keep",
    "log.evry=1": "log.every",
    "~observers.tensorbord": "tensorbord",
    "run.dri=x": "run.dir",
    "run.resum=never": "run.resume",
    "devce=cpu": "device",
    "precison=fp32": "precision",
    "compil=off": "compile",
    "chanels_last=true": "channels_last",
    "determinstic=true": "deterministic",
    "optim.weight_deca=0": "optim.weight_decay",
    "data.rot=x": "data.root",
    "data.wokers=1": "data.workers",
    "data.augment.corp=1": "data.augment.crop",
    "model.dropuot=0.1": "model.dropout",
    "task.label_smoothin=0": "task.label_smoothing",
    "~train.epocs": "train.epocs",
    "+ema.deacy=0.9": "decay",
    "++log.evry=1": "every",
    "+sead=1": "seed",
}  # fmt: skip

TYPES = [
    *(f"train.batch_size={value}" for value in ("two", "1.5", "[1]", "{a: 1}", "null", "true", "''")),
    *(f"train.epochs={value}" for value in ("all", "[1,2]", "1e", "--1")),
    *(f"train.steps={value}" for value in ("many", "0.5")),
    *(f"train.micro_batch={value}" for value in ("half", "2.5")),
    "train.eval_every=never",
    "train.clip_norm=big",
    "ema.decay=much",
    "checkpoint.every=epoch",
    "checkpoint.keep=all",
    "checkpoint.keep=null",
    "log.every=often",
    "seed=abc",
    "seed=1.5",
    "seed=null",
    "device=[cpu]",
    "deterministic=sometimes",
    "precision={a: b}",
    "train=5",
    "train=null",
    "log=[1]",
    "run.dir=[a]",
    "run.resume=null",
    "train.epochs=${train.nothing}",
    "train.epochs=${train.epochs}",
    "train.epochs=${",
]

RANGES = {
    "train.batch_size=0": "at least 1",
    "train.batch_size=-8": "at least 1",
    "train.micro_batch=0": "at least 1",
    "train.epochs=0": "above 0",
    "train.epochs=-1": "above 0",
    "train.epochs=nan": "finite",
    "train.epochs=-inf": "finite",
    "train.steps=0": "at least 1",
    "train.eval_every=0": "at least 1",
    "train.eval_batch_size=-1": "at least 1",
    "train.clip_norm=0": "above 0",
    "train.clip_norm=inf": "finite",
    "train.weight_decay_on=some": "one of",
    "sched.name=linear": "Use the group: sched=",
    "elastic=strict": "Use strategy=strict",
    "data.augment.flip=true": "It is data.augment.horizontal_flip",
    "data.side=64": "It is data.size",
    "sched=wsd sched.warmup=0.6 sched.cooldown=0.6": "it is longer than the run",
    "ema.decay=1": "below 1",
    "ema.decay=0": "above 0",
    "checkpoint.every=0": "at least 1",
    "checkpoint.keep=0": "at least 1",
    "log.every=0": "at least 1",
    "seed=-1": "at least 0",
    "seed=9223372036854775808": "seed",
    "precision=fp8": "one of",
    "compile=on": "compile",
    "controllers=[]": "controllers=[]: must hold keys and their values: controllers.<key>=...",
    "train=5": "train=5: must hold keys and their values",
    "compile=false": "compile=False: write off",
    "compile=off ema.decay=2": "below 1",
    "train.steps=null train.epochs=null": "give one",
}

CHOICES = [
    "recipe=nothing",
    "model=resnet999",
    "data=cifar100",
    "optim=adan",
    "sched=linearly",
    "strategy=fdsp",
]
CHOICES += [
    "model=5",
    "optim=null",
    "sched=''",
    "data={a: b}",
    "strategy=1.5",
    "model.=x",
]

LINES = {
    "recipe=nothing": "nothing",
    "": "recipe=<name>",
    "train": "recipe=<name>",
    "optim.lr=0.1": "recipe=<name>",
    "recipe": "recipe=<choice>",
    "trainn": "Did you mean train?",
    "eval run=x": "there is no such verb",
    "cnn_digits": "Write recipe=cnn_digits.",
    "train cnn_digits optim.lr=0.1": "Write recipe=cnn_digits.",
    "recipe=cnn_digits optim.learning_rate=0.1": "optim has betas, groups, layer_decay, lr, weight_decay.",
    "recipe=cnn_digits extra": "extra",
    "recipe=cnn_digits =5": "=5",
    "recipe=cnn_digits train.epochs": "train.epochs",
    "recipe=cnn_digits train..epochs=1": "train..epochs",
    "recipe=cnn_digits .epochs=1": ".epochs",
    "recipe=cnn_digits a=[": "a=[",
    "recipe=cnn_digits a='": "a='",
    "recipe=cnn_digits a={b": "a={b",
    "recipe=cnn_digits --epochs 5": "without dashes: train.epochs=5",
    "recipe=cnn_digits --batch-size 32": "without dashes: train.batch_size=32",
    "recipe=cnn_digits --lr=0.1": "without dashes: optim.lr=0.1",
    "recipe=cnn_digits --epocs=3": "without dashes: train.epochs=3",
    "recipe=cnn_digits --num_workers": "without dashes: data.workers=...",
    "--recipe cnn_digits": "without dashes: recipe=cnn_digits",
    "recipe=cnn_digits --multirn seed=1,2": "Did you mean --multirun?",
    "recipe=cnn_digits -x": "-x",
    "recipe=cnn_digits --cfg": "needs a value",
    "recipe=cnn_digits --config-dir": "needs a value",
    "recipe=cnn_digits --config-dir=nowhere": "nowhere",
    "recipe=cnn_digits --config-dir=file": "file",
    "recipe=cnn_digits hydra.searchpath=[nowhere]": "nowhere",
    "recipe=cnn_digits hydra.run.dir=x": "hydra.run.dir",
    "recipe=cnn_digits optim.lr=0.1,0.2": "a sweep needs --multirun",
    "recipe=cnn_digits seed=range(3)": "a sweep needs --multirun",
    "recipe=cnn_digits optim.lr=0,001": "for one number, write a point: optim.lr=0.001",
    "recipe=cnn_digits run.dir=a,b": "\"run.dir='a,b'\" is one text, 'run.dir=[a,b]' a list",
    "recipe=cnn_digits,cnn_cifar10": "Or give one name",
    "launch recipe=cnn_digits seed=1,2": "seed=1,2: a comma separates",
    "recipe=cnn_digits --multirun run.dir=x seed=1,2": "run.dir",
    "recipe=cnn_digits --multirun seed=1,2 train.epocs=1": "train.epocs",
    "launch --nproc-per-node=2 --max_restarts 3 -r 3 recipe=cnn_digits train.epocs=1": "train.epocs",
    "launch recipe=nothing": "nothing",
    "bench recipe=cnn_digits ranks=2 train.epocs=1": "train.epocs",
    "recipe=cnn_digits observers=[console] +observers=jsonl": "+observers=jsonl: does not go with",
    "recipe=cnn_digits ~strategy strategy=fsdp": "strategy=fsdp: does not go with ~strategy",
    "recipe=cnn_digits +optim.maximize=true freeze.x=1": "freeze.x=1: freeze is a list",
    "recipe=cnn_digits --multirun freeze.x=1 seed=1,2": "freeze.x=1: freeze is a list",
    "recipe=cnn_digits freeze.x=1": "freeze.x=1: freeze is a list; give all of it: freeze=[...]",
    "recipe=cnn_digits train.recompute.blocks=true": "train.recompute.blocks=true: train.recompute is a list",
    "recipe=cnn_digits init.skip.fc=true": "init.skip.fc=true: init.skip is a list",
    "evaluate run=saved +freeze.x=1": "+freeze.x=1: freeze is a list; give all of it: freeze=[...]",
    "evaluate run=saved +freeze.0=a": "freeze is a list",
    "recipe=cnn_digits --multirun hydra/launcher=null seed=1,2": "hydra/launcher=<name>",
    "recipe=cnn_digits --multirun hydra/launcher=5 seed=1,2": "hydra/launcher=<name>",
    "recipe=cnn_digits --package optim": "--package: says what --cfg shows",
    "recipe=cnn_digits --cfg=job --resolve": "--resolve: is for --cfg hydra",
    "recipe=cnn_digits --cfg=jobs": "--cfg jobs: must be one of job, hydra, all.",
    "recipe=cnn_digits --multirun --run seed=1,2": "--run: trains once",
    "--config-dir=. evaluate run=saved": "evaluate: a verb comes first",
    "evaluate": "run=",
    "evaluate run=": "run=",
    "evaluate run=saved --cfg=job": "--cfg: is for train, launch, bench, prove, find, write; evaluate",
    "evaluate run=saved --multirun seed=1,2": "evaluate composes no config",
    "report runs --multirun": "report composes no config",
    "doctor --cfg job": "doctor composes no config",
    "evaluate run=nowhere": "nowhere",
    "evaluate run=file": "file",
    "evaluate run=.": "config.yaml",
    "evaluate nowhere": "run=",
    "predict": "run=",
    "predict run=nowhere": "nowhere",
    "export": "run=",
    "export run=nowhere format=onnx": "nowhere",
    "write": "out=",
    "write recipe=cnn_digits": "out=",
    "write out=x": "recipe=",
    "write recipe=nothing out=x": "nothing",
    "write recipe=yolo_shapes out=x --multirun": "--multirun",
    "write recipe=yolo_shapes out=x data.sorce.train=1": "data.sorce.train",
    "evaluate run=saved train.epocs=1": "train.epocs",
    "evaluate run=saved seed=x": "seed",
    "evaluate run=saved data=nothing": "data=nothing",
    "evaluate run=saved recipe=cnn_digits": "the run's own recipe",
    "evaluate run=saved seed=1,2": "one value a key",
    "evaluate run=saved train.epochs=": "train.epochs",
    "evaluate run=saved train.epochs=nan": "finite",
    "predict run=saved train.epocs=1": "train.epocs",
    "export run=saved model.widht.x=1": "model.widht.x",
    "evaluate run=broken": "config.yaml",
    "evaluate run=list": "config.yaml",
    "evaluate run=old": "nothing_known",
}

EARLY = {
    **{f"{TYPED} {word}": right for word, right in TYPOS.items()},
    **{f"{TYPED} {word}": word.partition("=")[0] for word in TYPES},
    **{f"{TYPED} {words}": said for words, said in RANGES.items()},
    **{f"{TYPED} {word}": word.partition("=")[0] for word in CHOICES},
    **LINES,
}

JUDGE = """
import contextlib, io, json, os, sys
import ddptrain.config.compose, hydra
from ddptrain.verbs.main import main
for line in json.loads(sys.stdin.read()):
    if os.fork():
        os.wait()
        continue
    out, err = io.StringIO(), io.StringIO()
    before = sorted(os.walk("."))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = int(main(line.split(" ") if line else []))
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    found = [code, out.getvalue(), err.getvalue(), sorted(os.walk(".")) == before]
    os.write(1, json.dumps([*found, "torch" in sys.modules]).encode() + b"\\n")
    os._exit(0)
"""


@dataclass(frozen=True)
class Judged:
    """How one command line ended."""

    code: int | str
    out: str
    err: str
    left_nothing: bool
    torch_imported: bool


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Judged]:
    """All of them, one after the other, each in a fork of one process that has no torch."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "file").write_text("no folder")
    configs = {
        "saved": "recipe: cnn_digits\nfreeze: []\n",
        "broken": "a: [",
        "list": "- a",
        "old": "nothing_known: 1\n",
    }
    for name, text in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.yaml").write_text(text)
    sections = "train: {epochs: 1.0}\nseed: 0\nmodel: {width: 8}\n"
    sections += "".join(f"{name}: {{}}\n" for name in ("data", "optim", "sched", "strategy", "task"))
    (folder / "saved" / "config.yaml").write_text(configs["saved"] + sections)
    ended = subprocess.run(
        [sys.executable, "-c", JUDGE],
        input=json.dumps(list(EARLY)),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    results = [Judged(*json.loads(result)) for result in ended.stdout.splitlines()]
    return dict(zip(EARLY, results, strict=True))


def test_there_are_many() -> None:
    assert len(EARLY) >= 150


@pytest.mark.parametrize("line", EARLY)
def test_wrong_words_are_named_before_torch_is_imported(judged: dict[str, Judged], line: str) -> None:
    found = judged[line]
    assert found.code == 2, found
    assert found.err.startswith("ddptrain: ")
    assert found.err.count("ddptrain: ") == 1, found.err
    assert EARLY[line] in found.err
    assert "Traceback" not in found.err
    assert found.out == ""
    assert found.left_nothing
    assert not found.torch_imported
