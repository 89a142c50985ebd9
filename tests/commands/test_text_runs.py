"""Text recipes as a user runs them: what a run leaves behind, what it predicts, and what it refuses."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from compare import assert_same
from running import FAULTY
from shell import ddptrain, refusal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from texts import write_text

from ddptrain.engine.saved_checkpoint import read, unpack

TINY = (
    "device=cpu data=text data.source.path=text.txt data.window=16 data.valid_piece=64 data.valid_context=16"
    " model.width=16 model.ngram_rows=64 model.ngram_width=8 train.batch_size=8 train.steps=12"
    " train.eval_every=6 log.every=4 run.dir=run"
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def tiny(recipe: str) -> str:
    order = " data.order=shuffled" if recipe == "transformer_text" else ""
    return f"recipe={recipe} {TINY}{order}"


@pytest.mark.parametrize("recipe", ["lstm_text", "transformer_text"])
@pytest.mark.long
def test_a_text_run_shows_samples_and_predicts(tmp_path: Path, recipe: str) -> None:
    write_text(tmp_path / "text.txt")
    done = ddptrain(tmp_path, tiny(recipe), **ONE_THREAD)
    assert done.code == 0, done.err
    assert "perplexity" in done.err
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    judged = [line for line in lines if line["split"] == "valid"]
    assert [line["step"] for line in judged] == [6, 12]
    assert judged[1]["bits_per_byte"] < judged[0]["bits_per_byte"] < 8
    assert (tmp_path / "run/plots/sample.txt").read_text(errors="replace").startswith("def ")
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    samples = events.Tensors("valid/sample/text_summary")
    assert [sample.step for sample in samples] == [6, 12]
    assert b"    def " in samples[0].tensor_proto.string_val[0]

    asked = ["predict", "run=run", "prompt=the cat = a", "tokens=30", "seed=7", "device=cpu"]
    first = ddptrain(tmp_path, asked, **ONE_THREAD)
    assert first.code == 0, first.err
    assert first.out.startswith("the cat = a")
    assert ddptrain(tmp_path, asked, **ONE_THREAD).out == first.out
    assert ddptrain(tmp_path, [*asked[:-2], "seed=8", "device=cpu"], **ONE_THREAD).out != first.out
    named = ddptrain(tmp_path, ["predict", "run=run", "checkpoint=step-12", "tokens=5"], **ONE_THREAD)
    assert named.code == 0, named.err
    assert "run/checkpoints/step-12" in named.err


@pytest.mark.long
def test_the_translator_learns_a_few_pairs_by_heart(tmp_path: Path) -> None:
    """And then predicts them, by greedy decoding and by a beam."""
    done = ddptrain(
        tmp_path,
        "recipe=transformer_translate device=cpu data.train=12 data.valid=10 model.width=32 model.layers=1"
        " train.batch_size=12 train.steps=150 train.eval_every=150 optim.lr=0.01 log.every=50 run.dir=run",
        **ONE_THREAD,
    )
    assert done.code == 0, done.err
    assert "exact_match" in done.err
    from ddptrain.api.world import World
    from ddptrain.data.text.dates import DatePairs, decoded

    data = DatePairs(train=12, valid=10)
    data.prepare(World(), 0)
    source, target = (decoded(of[0].tolist()) for of in data._ready.train)
    for beam in (1, 4):
        told = ddptrain(tmp_path, ["predict", "run=run", f"text={source}", f"beam={beam}"], **ONE_THREAD)
        assert told.out == f"{target}\n", told.err


def kill_all(mark: str) -> int:
    """SIGKILL every process with this on its command line; torchrun's ranks have sessions of their own."""
    killed = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            if mark.encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
                killed += 1
    return killed


@pytest.mark.long
def test_a_killed_text_run_goes_on_to_the_same_end(tmp_path: Path) -> None:
    """torchrun and both ranks killed by SIGKILL, at some moment after the second checkpoint."""
    write_text(tmp_path / "text.txt")
    words = tiny("lstm_text").replace("run.dir=run", f"run.dir={tmp_path}/{{}}").split()
    words += ["train.steps=200", "train.eval_every=50", "checkpoint.every=5", "model.dropout=0.2"]
    command = [*TORCHRUN, "--nproc-per-node=2", "-m", "ddptrain", *words]
    environment = {**os.environ, **ONE_THREAD}

    def start(folder: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [word.format(folder) for word in command], cwd=tmp_path, env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    assert start("whole").wait(240) == 0
    stopped = start("stopped")
    while not (tmp_path / "stopped/checkpoints/step-10").is_dir():
        time.sleep(0.01)
        assert stopped.poll() is None
    assert kill_all(f"run.dir={tmp_path}/stopped") >= 1  # the agent, with which its ranks end
    stopped.wait()
    saved = max(int(path.name[5:]) for path in (tmp_path / "stopped/checkpoints").glob("step-*"))
    assert 10 <= saved < 200
    assert start("stopped").wait(240) == 0
    states = [unpack(read(tmp_path / name / "checkpoints/step-200")) for name in ("whole", "stopped")]
    assert states[0]["carried"]["hidden"].shape == (8, 2, 2, 16)
    assert_same(states[0], states[1])
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "stopped")]
    assert metrics[0] == metrics[1]


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.long
def test_a_missing_or_empty_text_is_refused(tmp_path: Path) -> None:
    lstm = tiny("lstm_text")
    assert "data.source.path=text.txt: there is no such file" in refusal(tmp_path, lstm)
    (tmp_path / "text.txt").write_text("")
    assert "the text is empty" in refusal(tmp_path, lstm)
    (tmp_path / "folder").mkdir()
    assert "data.source.path=folder: holds no file" in refusal(tmp_path, f"{lstm} data.source.path=folder")
    nameless = lstm.replace(" data.source.path=text.txt", "")
    assert "say which text: data.source.path=" in refusal(tmp_path, nameless)
    assert not (tmp_path / "run").exists()


def test_a_text_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("ten words\n" * 4)
    assert "data.window=100: the text to train on has 3" in refusal(
        tmp_path, f"{tiny('lstm_text')} data.window=100"
    )
    message = refusal(tmp_path, f"{tiny('lstm_text')} train.batch_size=50")
    assert "train.batch_size=50: makes as many streams" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_bytes_that_are_no_utf8_are_refused_as_characters_only(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"caf\xe9 au lait\n" * 400)
    message = refusal(tmp_path, f"{tiny('lstm_text')} data.level=characters")
    assert "text.txt: byte 3 is not UTF-8 (0xe9)" in message
    assert "data.level=bytes" in message
    done = ddptrain(tmp_path, f"{tiny('lstm_text')} train.steps=1", **ONE_THREAD)
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.level=words", "data.level=words: must be one of bytes, characters"),
        ("data.order=random", "data.order=random: must be one of streams, shuffled"),
        ("model.cell=lstmm", "model.cell=lstmm: must be one of rnn, gru, lstm"),
        ("model.width=0", "model.width=0: must be 1 or more"),
        ("model.ngrams=[1,2]", "model.ngrams=[1, 2]: must be different whole numbers from 2 on"),
        ("model.ngrams=3", "model.ngrams=3: must be a list"),
        ("model.dropout=1", "model.dropout=1: must be in [0, 1)"),
        ("train.weight_decay_on=biases", "train.weight_decay_on=biases: must be one of all, matrices"),
        ("data.windw=5", "TextData takes no such argument. Did you mean data.window?"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(tmp_path: Path, override: str, said: str) -> None:
    write_text(tmp_path / "text.txt")
    plus = "+" if "windw" in override else ""
    assert said in refusal(tmp_path, f"{tiny('lstm_text')} {plus}{override}")


def test_heads_that_do_not_divide_the_width_are_refused(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    message = refusal(tmp_path, f"{tiny('transformer_text')} model.heads=3")
    assert "model.heads=3: model.width=16 must be a multiple of twice the heads" in message


def test_a_sample_that_the_alphabet_lacks_is_refused_before_training(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    message = refusal(tmp_path, f"{tiny('lstm_text')} data.level=characters task.sample=XYZ")
    assert "task.sample: 'X', 'Y', 'Z' are not among the" in message


@pytest.mark.long
def test_more_ranks_than_streams_are_refused_once(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    ended = subprocess.run(
        [*TORCHRUN, "--nproc-per-node=3", "-m", "ddptrain", *tiny("lstm_text").split(), "train.batch_size=2"],
        cwd=tmp_path, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 1  # torchrun's own
    assert ended.stderr.count("ddptrain: train.batch_size=2: ") == 1, ended.stderr
    assert "3 ranks" in ended.stderr
    assert re.search(r"exitcode +: 2", ended.stderr)


@pytest.mark.long
def test_what_predict_is_asked_is_checked(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    done = ddptrain(tmp_path, f"{tiny('lstm_text')} data.level=characters task.sample=the", **ONE_THREAD)
    assert done.code == 0, done.err
    for words, said in (
        ("prompt=QUX", "prompt: 'Q', 'U', 'X' are not among the"),
        ("promt=the", "promt: predict takes no such word. Did you mean prompt?"),
        ("temperature=hot", "temperature=hot: must be a finite number"),
        ("temperature=-1", "temperature=-1.0: must be 0 or more"),
        ("top_k=0", "top_k=0: must be 1 or more"),
        ("top_k=2.5", "top_k=2.5: must be a whole number or null"),
        ("tokens=-1", "tokens=-1: must be 0 or more"),
        ("checkpoint=nowhere", "checkpoint=nowhere: run has no such checkpoint"),
        ("devise=cpu", "devise: predict takes no such word"),
        ("model.widht=3", "model.widht: there is no such key. Did you mean model.width"),
    ):
        assert said in refusal(tmp_path, ["predict", "run=run", words])
    assert "predict: name the run's folder" in refusal(tmp_path, "predict prompt=the")


def test_a_task_without_predictions_says_so(tmp_path: Path) -> None:
    own = f"--config-dir={FAULTY}"
    done = ddptrain(tmp_path, f"{own} recipe=faulty device=cpu train.steps=1 run.dir=run", **ONE_THREAD)
    assert done.code == 0, done.err
    assert "predict: Faulty has none" in refusal(tmp_path, f"predict {own} run=run")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("recipe=lstm_text data=shapes", "LanguageModelling needs TextData as its data, not ImageData"),
        ("recipe=cnn_digits data=stdlib_text", "a classifier needs the names of two classes"),
        ("recipe=transformer_translate data=stdlib_text", "Translation needs DatePairs as its data"),
        ("recipe=cnn_digits model=recurrent", "RecurrentModel needs vocabulary, which this recipe does not"),
        ("recipe=lstm_text model=cnn", "SmallCnn needs num_classes, which this recipe does not give"),
        ("recipe=lstm_text model=resnet18_32", "resnet18_32 needs num_classes"),
    ],
)  # fmt: skip
def test_parts_that_do_not_go_together_are_refused(tmp_path: Path, words: str, said: str) -> None:
    assert said in refusal(tmp_path, f"{words} device=cpu")


@pytest.mark.long
def test_under_torchrun_one_rank_answers_and_one_message_is_printed(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    done = ddptrain(tmp_path, f"{tiny('lstm_text')} data.level=characters task.sample=the", **ONE_THREAD)
    assert done.code == 0, done.err

    def asked(prompt: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*TORCHRUN, "--nproc-per-node=2", "-m", "ddptrain", "predict", "run=run", f"prompt={prompt}",
             "tokens=9"],
            cwd=tmp_path, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    answer = asked("the")
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout) == len("the") + 9 + 1
    refused = asked("QUX")
    assert refused.stderr.count("prompt: 'Q', 'U', 'X' are not among the") == 1
    assert "RuntimeError" not in refused.stderr


@pytest.mark.long
def test_characters_keep_their_meaning(tmp_path: Path) -> None:
    """A text with another alphabet of the same size gives the tokens another meaning."""
    text = write_text(tmp_path / "text.txt")
    words = f"{tiny('lstm_text')} data.level=characters task.sample=the"
    done = ddptrain(tmp_path, words, **ONE_THREAD)
    assert done.code == 0, done.err
    text.write_text(text.read_text().replace("c", "z"))
    message = refusal(tmp_path, "evaluate run=run")
    assert "its model's outputs stand for other classes or characters" in message
    assert "'c' only there, 'z' only here" in message
    assert "Use the data it was trained with" in message
    answer = ddptrain(tmp_path, "predict run=run")  # by the characters that the checkpoint knows
    assert answer.code == 0, answer.err
    assert "c" in answer.out
    assert "z" not in answer.out
    assert "was saved while training on other samples" in refusal(tmp_path, f"{words} train.steps=20")


@pytest.mark.long
def test_a_run_goes_on_in_another_precision(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    done = ddptrain(tmp_path, f"{tiny('lstm_text')} precision=bf16", **ONE_THREAD)
    assert done.code == 0, done.err
    for steps, precision in ((14, "fp32"), (16, "bf16")):
        done = ddptrain(
            tmp_path, f"{tiny('lstm_text')} train.steps={steps} precision={precision}", **ONE_THREAD
        )
        assert done.code == 0, done.err
        assert f"after {steps} steps" in done.err


def test_a_diverged_model_ends_the_run_with_its_own_message(tmp_path: Path) -> None:
    """Also where an evaluation, with its sample, comes before the loss is looked at."""
    write_text(tmp_path / "text.txt")
    done = ddptrain(
        tmp_path,
        f"{tiny('lstm_text')} optim.lr=1e30 train.clip_norm=null sched.warmup=0 log.every=50",
        **ONE_THREAD,
    )
    assert done.code == 4, done.err
    assert "Traceback" not in done.err
    assert "diverged" in done.err


def test_nodes_with_other_texts_are_refused(tmp_path: Path) -> None:
    """Two nodes of one rank each, in folders of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(2):
        node = tmp_path / f"node{rank}"
        node.mkdir()
        write_text(node / "text.txt").write_text("a text of this node only\n" * (200 + rank))
        variables = {
            "RANK": str(rank),
            "GROUP_RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, "-m", "ddptrain", *tiny("lstm_text").split()]
        environment = {**os.environ, **ONE_THREAD, **variables}
        started.append(
            subprocess.Popen(command, cwd=node, env=environment, stderr=subprocess.PIPE, text=True)
        )
    said = started[0].communicate(timeout=120)[1]
    assert started[0].returncode == 2, said
    assert "data: rank 1 sees" in said
    started[1].kill()  # it waits for torchrun to end it, so that the message stands alone
    started[1].communicate()


@pytest.mark.long
def test_a_reader_who_has_enough_ends_predict_quietly(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    done = ddptrain(tmp_path, tiny("lstm_text"), **ONE_THREAD)
    assert done.code == 0, done.err
    predict = f"{sys.executable} -m ddptrain predict run=run tokens=3000 prompt=the"
    piped = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {predict} | head -c 4"],
        cwd=tmp_path, env={**os.environ, **ONE_THREAD}, capture_output=True, timeout=120,
    )  # fmt: skip
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout.startswith(b"the")
    assert b"Traceback" not in piped.stderr
    narrow = ddptrain(tmp_path, ["predict", "run=run", "prompt=→é", "tokens=3"], PYTHONIOENCODING="ascii")
    assert narrow.code == 0, narrow.err
