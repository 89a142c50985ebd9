"""Trainings started from plain Python, and what their folders tell."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from marked import MARK, left_after, living
from omegaconf import OmegaConf
from PIL import Image
from running import stopped_steps
from shell import RANK_VARIABLES, ddptrain
from torchvision.transforms.v2.functional import to_pil_image

import ddptrain as python
from ddptrain.data.images.digits import Digits
from ddptrain.errors import UserError

WORDS = ["recipe=cnn_digits", "device=cpu", "train.epochs=3", "log.every=10"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> python.Run:
    """Of two ranks, with averaged weights."""
    folder = tmp_path_factory.mktemp("train") / "run"
    return python.train(*WORDS, "ema.decay=0.9", "optim.lr=0.01", f"run.dir={folder}", ranks=2)


def script(folder: Path, text: str) -> tuple["subprocess.Popen[str]", str]:
    """Started in a folder; its mark."""
    mark = uuid.uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", text], cwd=folder, stdout=said, stderr=subprocess.STDOUT, text=True,
            env={**inherited, "OMP_NUM_THREADS": "1", MARK: mark}, start_new_session=True,
        )  # fmt: skip
    return process, mark


def wait_for(file: Path, words: str, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while not file.exists() or words not in file.read_text():
        assert process.poll() is None, file.read_text()
        assert time.monotonic() < deadline, file.read_text()
        time.sleep(0.05)


# -- train ------------------------------------------------------------------------------------------


def test_two_ranks_train_and_the_run_tells_all(run: python.Run) -> None:
    environment = json.loads((run.folder / "environment.json").read_text())
    assert environment["world_size"] == 2
    summary = json.loads((run.folder / "summary.json").read_text())
    assert run.outcome == summary["outcome"] == "done"
    assert run.metrics == summary["metrics"]
    assert run.best["step"] == summary["best"]["step"]
    assert run.best["accuracy"] == summary["best"]["accuracy"]
    assert run.config["optim"]["lr"] == 0.01
    assert run.command.endswith(f"run.dir={run.folder}")
    assert list(run.checkpoints) == ["step-45", "step-68", "best"]
    assert all((path / "state.pt").is_file() for path in run.checkpoints.values())
    assert repr(run).startswith(f"<Run {run.folder}: done at step 68  accuracy {run.metrics['accuracy']:.4f}")


def test_the_curves_are_the_lines_of_metrics_jsonl(run: python.Run) -> None:
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert run.curves == lines
    steps, accuracy = run.curves.points("accuracy")
    assert steps == [23, 45, 68]
    assert accuracy == [line["accuracy"] for line in lines if line["split"] == "valid"]
    assert run.curves.points("loss", "train")[0] == [10, 20, 30, 40, 50, 60, 68]
    head, *rows = repr(run.curves).splitlines()
    assert head.split()[:6] == ["step", "epoch", "samples", "split", "loss", "lr"]
    assert len(rows) == len(lines) == 10
    with pytest.raises(UserError, match=r"acuracy: there is no such curve of split 'valid'; there are accu"):
        run.curves.points("acuracy")


def test_what_is_not_finite_and_what_is_long_can_be_shown_and_drawn(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "command.txt").write_text("python -m ddptrain\n")
    row = {"epoch": 0.5, "samples": 64, "split": "train"}
    rows = [{"step": n, **row, "loss": None if n == 30 else 0.25, "a/b": 1.0} for n in range(1, 31)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = python.Run(tmp_path)
    assert (run.outcome, run.metrics, run.best, run.checkpoints) == ("killed", {}, {}, {})
    assert np.isnan(run.curves.points("loss", "train")[1]).tolist() == [False] * 29 + [True]
    shown = repr(run.curves).splitlines()
    assert len(shown) == 1 + 10 + 1 + 10
    assert shown[11].split() == ["..."] * 5
    assert "a/b" not in shown[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mistake_is_a_user_error_with_the_message_of_the_command_line(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    has = r"optim has betas, groups, layer_decay, lr, weight_decay"
    hint = rf"Did you mean optim\.lr\? {has}\. If what is made there takes it, add it: \+optim\.lrr=\.\.\."
    with pytest.raises(ValueError, match=rf"^optim\.lrr: there is no such key\. {hint}$"):
        python.train("recipe=cnn_digits", "optim.lrr=0.1", ranks=ranks)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_what_torchrun_has_told_this_process_is_not_for_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "nowhere"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    run = python.train("recipe=cnn_digits", "device=cpu", "train.steps=3", f"run.dir={tmp_path}/run")
    assert (run.outcome, run.step) == ("done", 3)


@pytest.mark.long
def test_a_process_with_ascii_streams_finds_a_folder_beyond_ascii_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    program = (
        "import ddptrain, os; run = ddptrain.train('recipe=cnn_digits', 'device=cpu', 'train.steps=2',"
        " \"run.dir='läufe/日本'\"); os.chdir('elsewhere'); print('found', run.folder.is_dir(), run.command);"
        " print(ddptrain.Run(run.folder).outcome, ddptrain.load(run).checkpoint.is_dir())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "ascii:backslashreplace", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "run läufe/日本".encode("ascii", "backslashreplace") in done.stdout
    assert done.stdout.splitlines()[-2].startswith(b"found True python -m ddptrain recipe=cnn_digits")
    assert done.stdout.splitlines()[-1] == b"done True"


@pytest.mark.long
def test_a_stream_that_has_not_the_letters_shows_the_log_all_the_same(tmp_path: Path) -> None:
    program = "import ddptrain; ddptrain.train('recipe=cnn_digits', 'train.steps=1', \"run.dir='é'\")"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert rb"run \xe9" in done.stdout


def test_a_run_without_its_command_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    assert python.Run(tmp_path).command == ""


def test_what_is_no_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^ranks=0: must be 1 or more"):
        python.train("recipe=cnn_digits", ranks=0)
    for word in ("--multirun", "--cfg=job", "--help"):
        with pytest.raises(UserError, match=f"^{word}: train takes overrides, --config-dir and --env;"):
            python.train("recipe=cnn_digits", word)
    with pytest.raises(UserError, match=r"is no run's folder"):
        python.Run(tmp_path)


def test_a_training_that_fails_raises_with_the_end_of_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match=r"exit code 4:\n(.*\n)*ddptrain: step \d+ is not finite"):
        python.train(*WORDS, "optim.lr=1e30", f"run.dir={tmp_path}/run")
    assert python.Run(tmp_path / "run").outcome == "diverged"
    assert re.search(r"^ddptrain: step \d+ is not finite", capsys.readouterr().out, re.MULTILINE)


def test_a_mistake_is_raised_and_not_printed_before(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"^optim\.lrr: there is no such key"):
        python.train(*WORDS, "optim.lrr=1")
    assert "lrr" not in capsys.readouterr().out


FOREVER = "['recipe=cnn_digits', 'device=cpu', 'train.epochs=100000', 'log.every=1', 'run.dir=run']"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_saves_and_the_script_runs_on(tmp_path: Path, ranks: int) -> None:
    text = f"import ddptrain; run = ddptrain.train(*{FOREVER}, ranks={ranks}); print('outcome', run.outcome)"
    process, mark = script(tmp_path, text)
    wait_for(tmp_path / "said.txt", "step 1/", process)
    running = python.Run(tmp_path / "run")
    assert running.outcome == "running"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(60) == 0, (tmp_path / "said.txt").read_text()
    assert living(mark) == {}
    said = (tmp_path / "said.txt").read_text()
    assert said.endswith("outcome stopped\n")
    assert "Traceback" not in said
    stopped = python.Run(tmp_path / "run")
    assert [stopped.step] == stopped_steps(said)
    assert f"step-{stopped.step}" in stopped.checkpoints


@pytest.mark.parametrize(
    ("number", "ranks"),
    [
        pytest.param(signal.SIGHUP, 2, marks=pytest.mark.long),
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGUSR1, 2, marks=pytest.mark.long),
    ],
)
def test_what_ends_the_script_lets_the_training_save(tmp_path: Path, number: int, ranks: int) -> None:
    """A scheduler, or a terminal that is closed."""
    process, mark = script(
        tmp_path, f"import ddptrain; ddptrain.train(*{FOREVER}, ranks={ranks}); print('AFTER')"
    )
    wait_for(tmp_path / "said.txt", "step 1/", process)
    process.send_signal(number)
    assert process.wait(60) == 75, (tmp_path / "said.txt").read_text()
    assert living(mark) == {}
    said = (tmp_path / "said.txt").read_text()
    assert "AFTER" not in said
    assert "Traceback" not in said
    stopped = python.Run(tmp_path / "run")
    assert stopped.outcome == "stopped"
    assert f"step-{stopped.step}" in stopped.checkpoints


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_training_ends_with_the_process_that_started_it(tmp_path: Path, ranks: int) -> None:
    process, mark = script(tmp_path, f"import ddptrain; ddptrain.train(*{FOREVER}, ranks={ranks})")
    wait_for(tmp_path / "said.txt", "step 1/", process)
    process.kill()
    process.wait()
    assert left_after(mark, 10) == {}


def test_ctrl_c_before_the_run_begins_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    process, mark = script(tmp_path, f"import ddptrain; ddptrain.train(*{FOREVER}, ranks=2)")
    while len(living(mark)) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    assert left_after(mark, 5) == {}
    assert "KeyboardInterrupt: the training has ended before it could save" in (
        (tmp_path / "said.txt").read_text()
    )


# -- load -------------------------------------------------------------------------------------------


def test_a_loaded_model_answers_as_it_was_evaluated(run: python.Run, tmp_path: Path) -> None:
    """For all of the held out pictures; torch's own generator stays where it was."""
    valid = Digits().open(tmp_path).valid
    before = torch.get_rng_state()
    for checkpoint, expected in (("best", run.best), ("last", run.metrics)):
        model = python.load(run, checkpoint=checkpoint)
        pictures = [to_pil_image(image.permute(2, 0, 1)) for image in valid.images(torch.arange(len(valid)))]
        with torch.inference_mode():
            scores = model.module(torch.cat([model.preprocess(picture) for picture in pictures]))
        right = int((scores.argmax(dim=1) == valid.labels).sum())
        assert right / len(valid) == expected["accuracy"]
        assert model.classes == tuple("0123456789")
        assert not model.module.training
        assert not any(parameter.requires_grad for parameter in model.module.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    done = ddptrain(tmp_path, f"evaluate run={run.folder} checkpoint=best", OMP_NUM_THREADS="1")
    assert json.loads(done.out)["accuracy"] == run.best["accuracy"]


def test_the_best_checkpoint_is_loaded_unless_another_is_named(run: python.Run) -> None:
    if not OmegaConf.has_resolver("oc.decode"):  # another test has composed a config in this process
        OmegaConf.register_new_resolver("oc.decode", str)
    assert python.load(str(run.folder)).checkpoint == run.checkpoints["best"]
    assert python.load(run, checkpoint="step-45").checkpoint == run.checkpoints["step-45"]
    with pytest.raises(UserError, match="step-44"):
        python.load(run, checkpoint="step-44")
    with pytest.raises(UserError, match=r"optim\.lrr"):
        python.load(run, "optim.lrr=1")
    with pytest.raises(UserError, match="device=cuda"):
        python.load(run, device="cuda")
    with pytest.raises(UserError, match="device=cpu: is an argument of load"):
        python.load(run, "device=cpu")
    assert next(python.load(run, device=torch.device("cpu")).module.parameters()).device.type == "cpu"
    assert OmegaConf.has_resolver("oc.decode")  # OmegaConf is as it was


def test_a_picture_is_prepared_from_its_file_and_from_memory_alike(run: python.Run, tmp_path: Path) -> None:
    model = python.load(run)
    grey = Image.fromarray(np.arange(40 * 30, dtype=np.uint8).reshape(40, 30) % 251)
    turned = Image.Exif()
    turned[0x0112] = 6
    grey.convert("RGB").save(tmp_path / "turned.png", exif=turned)
    from_file = model.preprocess(tmp_path / "turned.png")
    assert (from_file.shape, from_file.dtype) == ((1, 1, 8, 8), torch.float32)
    with Image.open(tmp_path / "turned.png") as opened:
        assert torch.equal(model.preprocess(opened), from_file)
        assert opened.size == (30, 40)  # the user's own stays as it was
    assert torch.equal(model.preprocess(str(tmp_path / "turned.png")), from_file)
    with pytest.raises(UserError, match="32 bits a pixel"):
        model.preprocess(grey.convert("F"))
    with pytest.raises(UserError, match=r"gone\.png"):
        model.preprocess(tmp_path / "gone.png")


def test_importing_the_package_is_cheap_and_its_names_are_found() -> None:
    text = (
        "import sys, ddptrain; a = len(sys.modules); assert 'train' in dir(ddptrain);"
        " ddptrain.train, ddptrain.Run; assert 'torch' not in sys.modules;"
        " assert not hasattr(ddptrain, 'trian'); from ddptrain import load; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)
