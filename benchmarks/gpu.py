"""The first hour on a GPU: whether all of ddptrain works there, and how fast, part by part.

    python benchmarks/gpu.py                           # all parts, some 40 minutes on one GPU
    python benchmarks/gpu.py --budget=9                # a slice of nine minutes; once more for the next one
    python benchmarks/gpu.py --only=losses,beside --again=losses
    python benchmarks/gpu.py --write=docs/performance.md        # and what was found, between its markers
    python benchmarks/gpu.py --out=tried --small       # a few steps each, to try the script itself

Each part is a process of its own with a limit; the hour goes on after one that fails. Its folder is
<out>/parts/<name>, with the output of each command; <out> itself holds results.json, report.md and pictures.
A second start does what is not done. Exit code 1: a part has failed.

Where there is no network: --fetch-wheels=FOLDER elsewhere, then --wheels=FOLDER there.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_parts import report, wheels
from gpu_parts.part import Failed, Job, NotHere, end, tail, write_json
from gpu_parts.plan import PARTS

DONE = ("passed", "failed", "not on this device")
"""Verdicts that stand until --again."""


def main() -> None:
    arguments = _arguments()
    if arguments.fetch_wheels:
        wheels.fetch(arguments.fetch_wheels)
        return
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        _inside(arguments.part, out, arguments.small)
        return
    if arguments.wheels:
        wheels.install(arguments.wheels.resolve(), out / "site")
    if importlib.util.find_spec("ddptrain") is None:
        raise SystemExit(
            "ddptrain is not installed: `pip install -e .`, or --wheels where there is no network"
        )
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: the part in hand ends with it
        signal.signal(number, signal.default_int_handler)
    file = out / "results.json"
    results: dict[str, Any] = (
        json.loads(file.read_text()) if file.exists() else {"small": arguments.small, "parts": {}}
    )
    if results["small"] != arguments.small:
        raise SystemExit(f"--out={out}: was begun with small={results['small']}; name another folder")
    parts = results["parts"]
    for name in _again(arguments.again, parts):
        parts.pop(name, None)
    deadline = time.monotonic() + arguments.budget * 60
    for name in dict.fromkeys(["machine", *arguments.only]):
        if parts.get(name, {}).get("verdict") not in DONE:
            parts[name] = _outcome(name, parts, out, arguments, deadline)
            print(f"{parts[name]['verdict']:>20}  {name}: {parts[name]['said']}", flush=True)
            write_json(file, results)
    report.write(results, out)
    if arguments.write:
        report.publish_in(results, out, arguments.write)
    counts = report.counted(results)
    print(f"{counts}; {out / 'report.md'}")
    sys.exit(1 if any(part["verdict"] == "failed" for part in parts.values()) else 0)


def _again(asked: list[str], parts: dict[str, Any]) -> list[str]:
    failed = [name for name, part in parts.items() if part["verdict"] == "failed"]
    return [name for word in asked for name in (failed if word == "failed" else [word])]


def _outcome(
    name: str, parts: dict[str, Any], out: Path, asked: argparse.Namespace, deadline: float
) -> dict[str, Any]:
    """What has become of a part, or why it was not started."""
    part, known = PARTS[name], parts.get("machine", {}).get("figures", {})
    lacks, gpus = known.get("lacks", {}), len(known.get("facts", {}).get("gpus", []))
    missing = [ability for ability in part.needs if ability in lacks]
    left = deadline - time.monotonic()
    if missing:
        return _nothing("not on this device", f"{missing[0]}: {lacks[missing[0]]}")
    if name != "machine" and gpus < part.gpus:
        return _nothing(
            "not started", f"needs {part.gpus} GPUs, and there {'is' if gpus == 1 else 'are'} {gpus}"
        )
    if not asked.small and left < part.usual:
        return _nothing(
            "not started", f"the budget ends in {max(0, left):.0f} s; it takes some {part.usual:.0f}"
        )
    return _run(name, part.limit * asked.patience, out, asked.small, left)


def _nothing(verdict: str, said: str) -> dict[str, Any]:
    return {"verdict": verdict, "said": said, "figures": {}, "commands": []}


def _run(name: str, limit: float, out: Path, small: bool, left: float) -> dict[str, Any]:
    """The part as a process of its own, ended at its limit or the budget's."""
    folder = out / "parts" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [sys.executable, __file__, f"--out={out}", f"--part={name}", *(["--small"] if small else [])]
    began, date = time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S")
    cut = ""
    with (folder / "part.txt").open("wb") as file:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(min(limit, left))
        except subprocess.TimeoutExpired:
            cut = "the budget" if left < limit else f"its limit of {limit:.0f} s"
        finally:
            end(process, everyone=True)
    result_file = folder / "result.json"
    result = (
        json.loads(result_file.read_text()) if result_file.exists() else _nothing("failed", "it said nothing")
    )
    if cut:
        result["verdict"] = "cut short" if cut == "the budget" else "failed"
        result["said"] = f"ended by {cut}"
    elif process.returncode != 0:
        result["verdict"] = "failed"
    measured = {
        "rc": process.returncode,
        "seconds": time.monotonic() - began,
        "date": date,
        "limit": limit,
    }
    return {**result, **measured, "tail": tail(folder / "part.txt")}


def _inside(name: str, out: Path, small: bool) -> None:
    """The part's own process."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)  # so that what it has started is ended too

    signal.signal(signal.SIGTERM, leave)
    file = out / "results.json"
    known = json.loads(file.read_text())["parts"].get("machine", {}) if file.exists() else {}
    job = Job(out / "parts" / name, small, known.get("figures", {}).get("lacks", {}))
    job.tell("failed", "it was ended before it had finished")
    os.chdir(job.folder)
    try:
        job.tell("passed", PARTS[name].do(job))
    except NotHere as reason:
        job.tell("not on this device", str(reason))
    except Failed as failure:
        job.tell("failed", str(failure))
    except Exception as error:
        job.tell("failed", f"{type(error).__name__}: {error}")
        raise
    print(f"{len(job.commands)} commands, {json.loads((job.folder / 'result.json').read_text())['said']}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-hour"), help="the folder (%(default)s)")
    parser.add_argument(
        "--only", type=_names, default=list(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--again", type=_names_or_failed, default=[], metavar="A,B", help="anew; `failed`: those"
    )
    parser.add_argument("--budget", type=float, default=1e6, metavar="MINUTES", help="for this start")
    parser.add_argument(
        "--patience", type=float, default=1.0, metavar="TIMES", help="the limits, so many times"
    )
    parser.add_argument("--small", action="store_true", help="a few steps each")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between its gpu markers")
    parser.add_argument("--fetch-wheels", type=Path, metavar="FOLDER", help="bring wheels to a folder")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="install them from there")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # how this starts itself
    return parser.parse_args()


def _names(text: str) -> list[str]:
    unknown = [name for name in text.split(",") if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(PARTS)}")
    return text.split(",")


def _names_or_failed(text: str) -> list[str]:
    return ["failed"] if text == "failed" else _names(text)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("gpu.py: interrupted; started again, it goes on with what is not done")
