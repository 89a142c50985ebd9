"""Completion: what is offered, without slow imports, and in a real bash and a real zsh."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from debian import CannotRun, unpack
from shell import refusal, with_imports
from terminal import terminal

from ddptrain.config.arguments import GROUPS
from ddptrain.verbs.installed import verb_names
from ddptrain.verbs.launch import OF_TORCHRUN

CONF = Path(__file__).parents[2] / "conf"
PROGRAM = Path(sys.executable).with_name("ddptrain")
RECIPE = """# @package _global_
defaults:
  - finetune
  - override /optim: sgd
  - _self_
task:
  own: true
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One with a recipe, a choice, a run and a sweep's job."""
    for name, text in {
        "mine/recipe/birds.yaml": RECIPE,
        "mine/optim/lion.yaml": "_target_: mine.Lion\nlr: 0.1\n",
        "runs/cnn/one/config.yaml": "recipe: cnn_digits\noptim: {lr: 0.1, eps: 1}\n",
        "runs/with blanks/two/config.yaml": "",
        "sweeps/cnn/ledger.jsonl": "",
        "sweeps/cnn/000/config.yaml": "",
        "pictures/cats/1.png": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("best", "step-7"):
        (tmp_path / "runs/cnn/one/checkpoints" / name).mkdir(parents=True)
    return tmp_path


def offered(cwd: Path, line: str, breaks: str = "") -> list[str]:
    """What completes a line; without what would make it slow."""
    ended, imported = with_imports(cwd, ["completion", "words", line, breaks], VARIABLE="1")
    assert (ended.code, ended.err) == (0, "")
    assert not {"torch", "hydra", "omegaconf", "numpy", "rich"} & imported
    return ended.out.splitlines()


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def test_the_first_word(folder: Path) -> None:
    words = offered(folder, "ddptrain ")
    assert {f"{verb} " for verb in verb_names()} <= set(words)
    assert {"recipe=", "optim=", "optim.", "train.", "seed=", "checkpoint."} <= set(words)
    assert {f"{group}=" for group in GROUPS} <= set(words)
    assert not [word for word in words if "_target_" in word or word.startswith("hydra")]


def test_the_folder_of_yamls_may_be_below_the_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert offered(folder, "ddptrain --config-dir ~/mine optim=l") == ["optim=lion "]


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "controllers"])
def test_choices_of_a_group(group: str, folder: Path) -> None:
    assert offered(folder, f"ddptrain {group}=") == [f"{group}={name} " for name in names(group)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.b", ["train.batch_size="]),
        ("recipe=cnn", ["recipe=cnn_cifar10 ", "recipe=cnn_digits "]),
        ("--config-dir mine recipe=b", ["recipe=birds "]),
        ("--config-dir=mine optim=l", ["optim=lion "]),
        ("'hydra.searchpath=[mine]' recipe=b", ["recipe=birds "]),
        ("precision=f", ["precision=fp32 ", "precision=fp16 "]),
        ("sched=co", ["sched=constant ", "sched=cosine "]),
        ("channels_last=", ["channels_last=true ", "channels_last=false "]),
        ("checkpoint.background=t", ["checkpoint.background=true "]),
        ("run.resume=n", ["run.resume=never "]),
        ("observers=[console,js", [r"observers=\[console,jsonl"]),
        ("--multirun optim=adamw,s", ["optim=adamw,sgd"]),
        # of the YAMLs that the line chooses
        ("recipe=finetune data.source.s", ["data.source.size="]),
        ("recipe=finetune data=shapes data.source.s", ["data.source.seed="]),
        ("recipe=cnn_digits optim.b", ["optim.betas="]),
        ("recipe=cnn_digits optim=sgd optim.n", ["optim.nesterov="]),
        ("recipe=cnn_digits optim=sgd optim.nesterov=", ["optim.nesterov=true ", "optim.nesterov=false "]),
        ("recipe=resnet50_imagenet_600 model.na", ["model.name="]),
        ("--config-dir=mine recipe=birds optim.n", ["optim.nesterov="]),
        (
            "--config-dir=mine recipe=birds task.",
            ["task.class_weights=", "task.label_smoothing=", "task.own="],
        ),
        ("strategy.bu", ["strategy.bucket_cap_mb="]),
        # options
        ("--ex", ["--explain="]),
        ("--cfg j", ["job "]),
        ("--explain train.b", ["train.batch_size "]),
        ("--env VARIAB", ["VARIABLE "]),
        ("launch --nproc", ["--nproc-per-node="]),
        ("doctor --j", ["--json "]),
        # verbs
        ("ev", ["evaluate "]),
        (
            "evaluate run=",
            [f"run={name} " for name in ("runs/cnn/one", r"runs/with\ blanks/two", "sweeps/cnn/000")],
        ),
        ("evaluate run=runs/c", ["run=runs/cnn/"]),
        (
            "predict run=runs/cnn/one checkpoint=",
            [f"checkpoint={name} " for name in ("best", "last", "step-7")],
        ),
        ("predict run=runs/cnn/one so", ["source="]),
        ("evaluate run=runs/cnn/one optim.e", ["optim.eps="]),
        ("evaluate rec", []),
        ("export format=", ["format=onnx ", "format=openvino ", "format=pt2 "]),
        ("checkpoint v", ["verify "]),
        ("checkpoint convert run=x o", ["out="]),
        ("prove w", ["world "]),
        ("prove world recipe=cnn_d", ["recipe=cnn_digits "]),
        ("bench rou", ["rounds="]),
        ("write recipe=yolo_shapes lay", ["layout="]),
        ("report sweeps/", ["sweeps/cnn "]),
        ("completion z", ["zsh "]),
        # for files, by the shell itself
        ("data.root=", []),
        ("--config-dir ", []),
        ("recipe=nowhere data.source.", []),
    ],
)
def test_what_is_offered(line: str, expected: list[str], folder: Path) -> None:
    assert offered(folder, f"ddptrain {line}") == expected


def test_bash_gets_what_follows_its_word_breaks(folder: Path) -> None:
    assert offered(folder, "/a/b/ddptrain x=1 recipe=cnn_d", "=:\"'") == ["cnn_digits "]
    assert offered(folder, "ddptrain launch --nproc", "=:\"'") == ["--nproc-per-node="]


def test_every_option_of_launch_is_offered(folder: Path) -> None:
    words = {word.strip("= ") for word in offered(folder, "ddptrain launch --")}
    assert {name for name in OF_TORCHRUN if name.startswith("--")} <= words


def test_a_yaml_that_is_none_is_left_out(folder: Path) -> None:
    (folder / "mine/recipe/birds.yaml").write_text("defaults: [birds, {a: [b")
    assert "recipe=birds " in offered(folder, "ddptrain --config-dir=mine recipe=")
    assert offered(folder, "ddptrain --config-dir=mine recipe=birds train.b") == ["train.batch_size="]
    (folder / "mine/recipe/birds.yaml").write_text("defaults: [birds]\ntask: {own: 1}")
    assert offered(folder, "ddptrain --config-dir=mine recipe=birds task.") == ["task.own="]


@pytest.mark.parametrize(("words", "said"), [("", "completion : say"), ("fish", "completion fish: say for")])
def test_another_shell_is_refused(words: str, said: str, tmp_path: Path) -> None:
    assert "completion bash|zsh" in refusal(tmp_path, f"completion {words}")


def type_and_read(shell: list[str], folder: Path, **variables: str) -> None:
    """The one line of the README, and then what a user types."""
    place = f"{PROGRAM.parent}:{os.environ['PATH']}"
    with terminal(shell, folder, {"PATH": place, "PS1": "$ ", **variables}) as screen:
        screen.wait_for("$")
        screen.type(f'eval "$(ddptrain completion {Path(shell[0]).name})" && echo re""ady', "Enter")
        screen.wait_for("ready")
        for typed, completed in {
            "ddptrain recipe=cnn_d": "ddptrain recipe=cnn_digits _",
            "ddptrain --config-dir mine recipe=bi": "ddptrain --config-dir mine recipe=birds _",
            "ddptrain train.b": "ddptrain train.batch_size=_",
            "ddptrain recipe=finetune data.source.si": "ddptrain recipe=finetune data.source.size=_",
            "ddptrain precision=bf": "ddptrain precision=bf16 _",
            "ddptrain ev": "ddptrain evaluate _",
            "ddptrain evaluate run=runs/c": "ddptrain evaluate run=runs/cnn/_",
            r"X=1 ddptrain report runs/with\ blanks/": r"X=1 ddptrain report runs/with\ blanks/two _",
            "cd . && ddptrain evaluate run=runs/cnn/": "ddptrain evaluate run=runs/cnn/one _",
            "ddptrain launch --nproc-p": "ddptrain launch --nproc-per-node=_",
            "ddptrain data.root=pict": "ddptrain data.root=pictures/_",
            f"{PROGRAM} optim=rm": f"{PROGRAM} optim=rmsprop _",
        }.items():
            screen.clear()
            screen.type(typed, "Tab", "_")
            screen.wait_for(completed)
        screen.clear()
        screen.type("ddptrain recipe=", "Tab", "Tab")
        listed = screen.wait_for("yolo_shapes")
        assert not [name for name in names("recipe") if name not in listed]


@pytest.mark.skipif(not shutil.which("tmux"), reason="there is no tmux here")
def test_in_a_real_bash(folder: Path) -> None:
    type_and_read(["bash", "--norc", "--noprofile"], folder)


@pytest.mark.shells
@pytest.mark.skipif(not shutil.which("tmux"), reason="there is no tmux here")
def test_in_a_real_zsh(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("zsh")
    shell, setup = shutil.which("zsh"), ""
    if shell is None:
        try:
            root = unpack(["zsh"], home)
        except CannotRun as why:
            pytest.skip(str(why))
        shell = str(root / "bin/zsh")
        (modules,) = root.glob("usr/lib/*/zsh/*")
        functions = [str(path) for path in (root / "usr/share/zsh/functions").rglob("*") if path.is_dir()]
        setup = f"module_path=({modules})\nfpath=({' '.join(functions)})\n"
    (home / ".zshrc").write_text(f"{setup}PS1='$ '\nunsetopt BEEP\n")
    type_and_read([shell], folder, ZDOTDIR=str(home), HOME=str(home))
