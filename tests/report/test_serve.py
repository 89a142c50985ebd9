"""``serve``: all runs below a folder on a page that follows them, and nothing else of the machine."""

import fcntl
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
from browser import Browser
from shell import refusal

MakeRun = Callable[..., Path]


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[int]:
    """The port of a server of the runs below a folder."""
    line = [sys.executable, "-m", "ddptrain", "serve", str(folder), "port=0", *words]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            yield int(re.findall(r":(\d+)/ ", said)[0])
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert process.stdout.read() == ""


def asked(port: int, path: str, host: str = "localhost") -> tuple[int, str, dict[str, str]]:
    """Status, text and headers. path: sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", f"{host}:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.headers)


def rows_of(port: int, count: int) -> list[dict[str, str]]:
    """The list, once it has so many rows."""
    until = time.monotonic() + 30
    while len(rows := json.loads(asked(port, "/runs")[1])) != count:
        assert time.monotonic() < until, rows
        time.sleep(0.1)
    return list(rows)


def test_runs_are_listed_and_shown(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("a/one")
    make_run("b/deep/two", lr=0.3, seed=1, outcome="diverged")
    with serving(tmp_path) as port:
        rows = {row["path"]: row for row in rows_of(port, 2)}
        assert rows.keys() == {"a/one", "b/deep/two"}
        one = rows["a/one"]
        assert (one["recipe"], one["state"], one["steps"], one["time"]) == (
            "toy",
            "done",
            "200 of 200",
            "0:12",
        )
        assert one["metric"].startswith("accuracy 0.9")
        assert rows["b/deep/two"]["state"] == "diverged"
        status, text, headers = asked(port, "/page?path=a%2Fone")
        assert status == 200
        assert "python -m ddptrain recipe=toy optim.lr=0.1" in text
        assert headers["Content-Security-Policy"] == "frame-ancestors 'self'"
        both = asked(port, f"/page?path=a/one&path={quote('b/deep/two')}")[1]
        assert "2 runs" in both
        assert "optim.lr" in both


def test_what_changes_is_seen(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run("one")
    with serving(tmp_path) as port:
        [before] = rows_of(port, 1)
        first = asked(port, "/page?path=one")[1]
        line = {
            "step": 210,
            "epoch": 30.0,
            "samples": 13440,
            "split": "valid",
            "accuracy": 0.999,
            "loss": 0.1,
        }
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        until = time.monotonic() + 30
        while (after := rows_of(port, 1)[0]) == before:
            assert time.monotonic() < until
            time.sleep(0.2)
        assert after["version"] != before["version"]
        assert "0.999" in after["metric"]
        assert asked(port, "/page?path=one")[1] != first
        run.rename(tmp_path / "other")
        while rows_of(port, 1)[0]["path"] != "other":
            assert time.monotonic() < until
            time.sleep(0.2)
        assert asked(port, "/page?path=one")[0] == 404


def test_a_sweep_follows_its_jobs_and_one_that_is_damaged_hides_nothing(
    tmp_path: Path, make_run: MakeRun
) -> None:
    job = {"number": 0, "key": "a", "words": [], "status": "running", "began": 1.0}
    run = make_run("sweep/000")
    (tmp_path / "sweep/ledger.jsonl").write_text(json.dumps(job) + "\n")
    make_run("damaged/000")
    (tmp_path / "damaged/ledger.jsonl").write_text("[[[\n\0")
    odd = {"event": "ended", "job": 0, "status": ["x"], "code": 0, "why": "", "seconds": 1.0}
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/ledger.jsonl").write_text(
        '{"event": "job", "job": 0, "key": "a", "words": []}\n' + json.dumps(odd) + "\n"
    )
    make_run("one")
    with serving(tmp_path) as port:
        before = {row["path"]: row for row in rows_of(port, 6)}
        for name in ("damaged", "odd"):
            assert before[name]["state"].startswith("can't be read")
        assert asked(port, "/page?path=damaged")[0] == 404
        with (run / "metrics.jsonl").open("a") as file:
            file.write(
                json.dumps({"step": 999, "epoch": 1.0, "samples": 1, "split": "valid", "loss": 0.5}) + "\n"
            )
        until = time.monotonic() + 30
        while {row["path"]: row for row in rows_of(port, 6)}["sweep"]["version"] == before["sweep"][
            "version"
        ]:
            assert time.monotonic() < until
            time.sleep(0.2)


def test_the_jobs_of_a_sweep_that_goes_on_are_running(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("sweep/000")
    job = {"event": "job", "job": 0, "key": "a", "words": [], "time": 0.0}
    started = {"event": "started", "job": 0, "gpus": [], "on_cpu": True, "time": 0.0}
    (tmp_path / "sweep/ledger.jsonl").write_text(f"{json.dumps(job)}\n{json.dumps(started)}\n")
    with (tmp_path / "sweep/.lock").open("w") as lock, serving(tmp_path) as port:
        states = {row["path"]: row["state"] for row in rows_of(port, 2)}
        assert states["sweep"] == "1 stopped"
        fcntl.flock(lock, fcntl.LOCK_EX)
        until = time.monotonic() + 30
        while {row["path"]: row["state"] for row in rows_of(port, 2)}["sweep"] != "1 running":
            assert time.monotonic() < until
            time.sleep(0.2)


def test_a_browser_that_leaves_is_no_error(tmp_path: Path, make_run: MakeRun) -> None:
    """`serving` asserts that nothing is said."""
    make_run("one", lines=2000)
    with serving(tmp_path) as port:
        rows_of(port, 1)
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as gone:
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                gone.sendall(f"GET /page?path=one HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n".encode())
        assert asked(port, "//[")[0] == 404


HOSTILE = [
    "/../secret.txt", "/..%2fsecret.txt", "/%2e%2e/secret.txt", "//etc/passwd", "/etc/passwd",
    "/runs/../../secret.txt", "/metrics.jsonl", "/one/metrics.jsonl", "/page", "/page?path=",
    "/page?path=../secret", "/page?path=..%2fsecret", "/page?path=/etc", "/page?path=%2fetc%2fpasswd",
    "/page?path=one/..", "/page?path=one/../../secret", "/page?path=./one", "/page?path=one%00",
    "/page?path=one/", "/page?path=~", "/page?path=file:///etc", "/page?path=one&path=../secret",
    "/page?path=link", "/page?path=.hidden",
]  # fmt: skip


def test_nothing_outside_of_the_folder_is_served(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("served/one")
    make_run("secret")
    make_run("served/.hidden")
    (tmp_path / "secret.txt").write_text("the secret")
    (tmp_path / "served/link").symlink_to(tmp_path / "secret")
    with serving(tmp_path / "served") as port:
        rows_of(port, 1)
        for address in HOSTILE:
            status, text, headers = asked(port, address)
            assert status == 404, address
            assert "secret" not in text
            assert headers["Content-Security-Policy"] == "default-src 'none'"


def test_another_site_can_not_read_it_by_a_name_of_its_own(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("one")
    with serving(tmp_path) as port:
        for host in ("evil.example", "127.0.0.1.evil.example", ""):
            assert asked(port, "/runs", host)[0] == 403
        for host in ("127.0.0.1", "localhost", "[::1]"):
            assert asked(port, "/runs", host)[0] == 200


def test_text_of_a_run_is_no_markup(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run("one")
    (run / "config.yaml").write_text("recipe: '<img src=x onerror=alert(1)>'\n")
    with serving(tmp_path) as port:
        [row] = rows_of(port, 1)
        assert row["recipe"] == "<img src=x onerror=alert(1)>"  # the page puts it in as text
        assert "<img src=x" not in asked(port, "/page?path=one")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nowhere", "serve nowhere: there is no such folder."),
        (". port=x", "port=x: must be 0 to 65535."),
        (". prot=1", "prot=1: serve takes no such word. Did you mean port?"),
        ("a b", "serve a b: takes one folder, and shows all runs below it."),
        (". address=300.1.1.1 port=0", "serve: can't listen at 300.1.1.1:0 ("),
        (". address=", "address=: must be an address"),
    ],
)
def test_wrong_words(tmp_path: Path, words: str, said: str) -> None:
    assert refusal(tmp_path, f"serve {words}").startswith(said)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with serving(tmp_path) as port:
        assert "Name another one: port=<n>." in refusal(tmp_path, f"serve . port={port}")


@pytest.mark.browser
def test_two_hundred_runs_in_a_browser(tmp_path: Path, make_run: MakeRun, browser: Browser) -> None:
    """The first picture in 2 seconds; what changes is shown without loading the page again."""
    for i in range(200):
        make_run(f"runs/run-{i:03}", lr=0.001 * (i + 1), seed=i)
    with serving(tmp_path / "runs") as port, browser.tab(width=1400, height=1000) as tab:
        seconds = tab.open(f"http://127.0.0.1:{port}/")
        began = time.monotonic()
        tab.wait_for("document.querySelectorAll('tbody tr').length > 0")
        tab.wait_for("document.querySelector('#report iframe:not(.next)') !== null")
        assert seconds + time.monotonic() - began < 2
        tab.wait_for("document.querySelectorAll('tbody tr').length === 200")
        tab.evaluate("window.same = true")
        rows = "[...document.querySelectorAll('tbody tr')]"
        tab.evaluate(f"{rows}.find((row) => row.innerText.includes('run-007')).click()")
        frame = "document.querySelector('#report iframe:not(.next)').contentDocument.body.innerText"
        tab.wait_for(f"{frame}.includes('run-007')")
        inside = "document.querySelector('#report iframe:not(.next)').contentDocument"
        tab.evaluate(f"{inside}.querySelector('details').open = true")
        tab.evaluate(f"{inside}.querySelector('[data-across=epoch]').click()")
        with (tmp_path / "runs/run-007/metrics.jsonl").open("a") as file:
            line = {
                "step": 210,
                "epoch": 30.0,
                "samples": 1,
                "split": "valid",
                "accuracy": 0.98765,
                "loss": 0.1,
            }
            file.write(json.dumps(line) + "\n")
        tab.wait_for("document.querySelector('tbody').innerText.includes('0.98765')", timeout=20)
        tab.wait_for(f"{frame}.includes('0.98765')", timeout=20)
        assert tab.evaluate(f"{inside}.querySelector('details').open")
        assert tab.evaluate(f"{inside}.querySelector('[data-across=epoch]').ariaPressed") == "true"
        assert tab.evaluate(f"{inside}.querySelector('[data-across=step]').ariaPressed") == "false"
        assert tab.evaluate("window.same")
        tab.evaluate("document.querySelectorAll('tbody input')[3].click()")
        tab.wait_for(f"{frame}.includes('2 runs')")
        tab.evaluate(
            "const s = document.querySelector('input[type=search]'); s.value = 'run-01';"
            " s.dispatchEvent(new Event('input'))"
        )
        assert tab.evaluate("document.querySelectorAll('tbody tr:not([hidden])').length") == 10
        assert tab.complaints == []
        assert all(url.startswith(f"http://127.0.0.1:{port}/") for url in tab.requests)
        if "DDPTRAIN_SCREENSHOTS" in os.environ:
            tab.screenshot(Path(os.environ["DDPTRAIN_SCREENSHOTS"]) / "serve.png")


def test_more_runs_than_stand_beside_each_other(tmp_path: Path, make_run: MakeRun) -> None:
    names = [f"{i:02}" for i in range(26)]
    for name in names:
        make_run(name)
    with serving(tmp_path) as port:
        rows_of(port, 26)
        _, page, _ = asked(port, "/page?" + "&".join(f"path={name}" for name in names))
    assert "26 are chosen; these are the first 24." in page
    assert page.count('class="run"') == 24
