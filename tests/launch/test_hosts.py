"""launch/multinode.sh on real hosts (network namespaces): what it refuses, and what follows a lost host."""

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import MULTINODE, Hosts, Started, hosts_of
from running import FAULTY, Job, assert_same_outcome

from ddptrain.distributed.launcher.rendezvous import LAST_WORD_S

ENDPOINT = "host1:29400"
HANG_S = 4
SET_TIME_S = HANG_S + LAST_WORD_S + 5
"""In which every host ends: beyond these two, a try of 2 s to reach the others, and the ends of processes."""
BITS = [f"--config-dir={FAULTY}", "recipe=faulty", "device=cpu", "run.dir=run", "strategy=strict"]
LONG = [
    *(*BITS, f"hang_timeout={HANG_S}", "train.steps=1000", "checkpoint.every=20", "train.eval_every=500"),
    "data.pace=0.005",
]
ELASTIC = {
    "PET_NNODES": "1:3",
    "PET_MAX_RESTARTS": "5",
    # torchrun takes a host for dead after three beats: 3 s instead of 15
    "PET_RDZV_CONF": "keep_alive_interval=1,last_call_timeout=3",
}


def start(hosts: Hosts, host: int, *words: str, nproc: int = 1, **variables: str) -> Started:
    """``-``: such a variable is not set."""
    given = {
        "PET_NNODES": str(hosts.count),
        "PET_NPROC_PER_NODE": str(nproc),
        "PET_RDZV_ENDPOINT": ENDPOINT,
        "PET_RDZV_ID": "job1",
        **variables,
    }
    return hosts.start(host, ["sh", str(MULTINODE), *words], **{k: v for k, v in given.items() if v != "-"})


def start_all(hosts: Hosts, *words: str, nproc: int = 1, **variables: str) -> dict[int, Started]:
    return {host: start(hosts, host, *words, nproc=nproc, **variables) for host in range(1, hosts.count + 1)}


def wait_until_three_train(jobs: dict[int, Started], timeout: float = 120) -> dict[int, str]:
    """Together, beyond a checkpoint; what each job has said by then. A host that starts late finds the others
    training."""
    deadline = time.monotonic() + timeout
    at_step_30 = re.compile(r", 3 ranks on 3 nodes.*^step ([3-9]\d|\d{3,})/", re.DOTALL | re.MULTILINE)
    while not any(at_step_30.search(job.text) for job in jobs.values()):
        assert time.monotonic() < deadline, [job.text[-2500:] for job in jobs.values()]
        time.sleep(0.05)
    return {host: job.text for host, job in jobs.items()}


def wait_for_any(jobs: dict[int, Started], words: str, times: int = 1, timeout: float = 120) -> float:
    """When all of them together have said so, as many times."""
    deadline = time.monotonic() + timeout
    while sum(job.text.count(words) for job in jobs.values()) < times:
        said = "\n".join(job.text[-2500:] for job in jobs.values())
        assert time.monotonic() < deadline, f"no {words!r}:\n{said}"
        assert any(job.process.poll() is None for job in jobs.values()), f"ended without {words!r}:\n{said}"
        time.sleep(0.05)
    return time.monotonic()


def seconds_to_end(jobs: dict[int, Started], since: float, timeout: float) -> dict[int, float]:
    ended: dict[int, float] = {}
    while len(ended) < len(jobs):
        for host, job in jobs.items():
            if host not in ended and job.process.poll() is not None:
                ended[host] = time.monotonic() - since
        said = "\n".join(f"host{host}:\n{job.text[-2500:]}" for host, job in jobs.items())
        assert time.monotonic() - since < timeout, f"after {timeout:g} s only {ended} have ended:\n{said}"
        time.sleep(0.05)
    print({host: round(seconds, 1) for host, seconds in ended.items()})
    return ended


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts_of(2, tmp_path_factory.mktemp("two")) as hosts:
        yield hosts


@pytest.mark.parametrize(
    ("host", "variables", "said"),
    [
        (1, {"PET_NNODES": "-"}, "PET_NNODES is not set: give the number of hosts"),
        (1, {"PET_RDZV_ENDPOINT": "-"}, "PET_RDZV_ENDPOINT is not set: give <host>:<port>"),
        (1, {"PET_RDZV_ID": "-"}, "PET_RDZV_ID is not set: give the job a name"),
        (1, {"PET_RDZV_BACKEND": "static"}, "PET_RDZV_BACKEND=static: this script is for c10d"),
        (1, {"PET_RDZV_ENDPOINT": "host1"}, "PET_RDZV_ENDPOINT=host1: must be <host>:<port>"),
        (1, {"PET_RDZV_ENDPOINT": "host1:99999"}, "a port from 1 to 65535"),
        (1, {"PET_RDZV_ENDPOINT": "hots1:29400"}, "host1 can't resolve hots1"),
        (1, {"PET_RDZV_ENDPOINT": "localhost:29400"}, "every host takes that for itself"),
        (2, {"PET_RDZV_ENDPOINT": "192.0.2.7:29400"}, "host2 has no route to 192.0.2.7; its NICs: eth0, lo"),
        (2, {"GLOO_SOCKET_IFNAME": "ib0"}, "IFNAME=ib0: host2 has no NIC of that name; it has eth0, lo."),
        (2, {"NCCL_SOCKET_IFNAME": "ib"}, "IFNAME=ib: host2 has no NIC of that name; it has eth0, lo."),
        (1, {"PET_LOCAL_ADDR": "10.9.9.9"}, "no NIC of host1 has that address; it has 10.77.0.1"),
        (2, {"MULTINODE_WAIT": "2"}, "can't be reached from host2 (connection refused), after 2 s. Refused"),
        (2, {"MULTINODE_WAIT": "soon"}, "MULTINODE_WAIT=soon: must be a whole number of seconds"),
    ],
)  # fmt: skip
def test_a_wrong_environment_is_refused(two: Hosts, host: int, variables: dict[str, str], said: str) -> None:
    ended = start(two, host, "recipe=cnn_digits", **variables)
    assert ended.wait(30) == 2, ended.text
    assert said in ended.text.splitlines()[-1]
    assert len([line for line in ended.text.splitlines() if "waits for" not in line]) == 1


def test_a_port_that_is_taken_is_refused(two: Hosts) -> None:
    listen = "import socket, time; s = socket.create_server(('', 29401)); print('up', flush=True)"
    two.start(1, ["python", "-c", f"{listen}; time.sleep(99)"]).wait_for("up")
    ended = start(two, 1, "recipe=cnn_digits", PET_RDZV_ENDPOINT="host1:29401")
    assert ended.wait(30) == 2
    assert "host1:29401: port 29401 of host1 is not free (Address already in use)" in ended.text


@pytest.mark.long
def test_a_host_behind_a_firewall_is_told_where_it_waited(two: Hosts) -> None:
    two.drop_answers(1, to=2)
    try:
        ended = start(two, 2, "recipe=cnn_digits", MULTINODE_WAIT="4")
        assert ended.wait(30) == 2
    finally:
        two.drop_answers(1, to=2, end=True)
    waits, refused = ended.text.splitlines()
    assert waits.startswith("multinode.sh: host2 waits for host1:29400, up to 4 s (")
    assert "can't be reached from host2 (no answer), after 4 s" in refused
    assert "likely a firewall between them; open port 29400" in refused


@pytest.mark.long
def test_no_address_or_nic_that_leads_nowhere_is_taken(tmp_path: Path) -> None:
    """A NIC beside the one that leads to the others (Docker's), and Debian's entry for a host's own name."""
    with hosts_of(2, tmp_path) as hosts:
        for host in (1, 2):
            hosts.add_nic(host, "docker0", "172.17.0.1/16")
        hosts.names = hosts.names.replace("10.77.0.1 host1", "127.0.1.1 host1")
        first = start(hosts, 1, *BITS, "train.steps=3")
        hosts.names = hosts.names.replace("127.0.1.1 host1", "10.77.0.1 host1")
        second = start(hosts, 2, *BITS, "train.steps=3", NCCL_SOCKET_IFNAME="^docker0")
        assert [first.wait(), second.wait()] == [0, 0], first.text + second.text
        assert "host1 is 10.77.0.1 on eth0, the hosts meet at host1:29400 (this one)" in first.text
        assert "host2 is 10.77.0.2 on eth0, the hosts meet at host1:29400" in second.text


def test_hosts_leave_nothing_behind(tmp_path: Path) -> None:
    def fail_on(hosts: Hosts) -> None:
        started.append(hosts.start(2, ["sh", "-c", "sleep 99 & echo begun; sleep 99"]))
        started[0].wait_for("begun")
        assert len(list(spaces.glob(f"{hosts.tag}*"))) == 3
        raise ZeroDivisionError(hosts.tag)

    spaces, started = Path("/var/run/netns"), list[Started]()
    with pytest.raises(ZeroDivisionError) as failed, hosts_of(2, tmp_path) as hosts:
        fail_on(hosts)
    assert started[0].process.returncode == -9
    assert not list(spaces.glob(f"{failed.value}*"))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("count", "nproc", "words"),
    [
        (2, 1, ["recipe=cnn_digits", "device=cpu", "run.dir=run", "train.epochs=2"]),
        (2, 2, [f"--config-dir={FAULTY}", "recipe=faulty", "device=cpu", "run.dir=run"]),
        (3, 1, [f"--config-dir={FAULTY}", "recipe=faulty", "device=cpu", "run.dir=run"]),
    ],
)
def test_several_hosts_train_like_one(
    tmp_path: Path, count: int, nproc: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run, and to the bit what as many ranks on one host come to, with as many threads."""
    monkeypatch.setenv("DDPTRAIN_CORES", "1")  # ranks that share a host would share its cores
    (tmp_path / "one").mkdir()
    one = Job(words, tmp_path / "one", count * nproc)
    assert one.wait() == 0, one.text[-3000:]
    with hosts_of(count, tmp_path) as hosts:
        jobs = start_all(hosts, *words, nproc=nproc)
        assert [job.wait() for job in jobs.values()] == [0] * count, [job.text for job in jobs.values()]
    assert_same_outcome(tmp_path / "run", tmp_path / "one/run")
    assert json.loads((tmp_path / "run/environment.json").read_text())["nodes"] == count
    assert [path.parent.name for path in tmp_path.glob("*/summary.json")] == ["run"]
    said = "".join(job.text for job in jobs.values())
    assert said.count("done: accuracy") == 1, "the first rank speaks for all"


@pytest.mark.cluster
@pytest.mark.parametrize(("count", "nproc", "lost"), [(3, 1, 3), (3, 1, 2), (3, 1, 1), (2, 2, 2)])
def test_a_cut_link_ends_a_job_of_fixed_size_on_every_host(
    tmp_path: Path, count: int, nproc: int, lost: int
) -> None:
    """Also the one whose link was cut, and where it is the one at which all meet."""
    with hosts_of(count, tmp_path) as hosts:
        jobs = start_all(hosts, *LONG, nproc=nproc)
        wait_for_any(jobs, "step 30/")
        ended = seconds_to_end(jobs, hosts.cut(lost), SET_TIME_S)
        assert [job.process.returncode for job in jobs.values()] == [76] * count, ended
        assert all(hosts.pids(host) == [] for host in jobs)
    ranks = [(lost - 1) * nproc + local for local in range(nproc)]
    for host, job in jobs.items():
        if host == lost:
            continue
        named = re.findall(rf"^rank (\d) \(pid \d+ on host{lost}\) does not answer", job.text, re.MULTILINE)
        assert named == ([str(rank) for rank in ranks] if lost != 1 else [])
        if lost == 1:
            assert "host1 (rank 0) is lost, or the link to it, or rank 0 is stopped" in job.text
            assert f"host{host} has not reached the rendezvous at host1:29400 for 14 s" in job.text
    others = "host1" if lost != 1 else "host2"
    assert others in jobs[lost].text, "the host that was cut off says whom it has lost"


@pytest.mark.cluster
def test_a_host_that_is_lost_before_a_step_is_done_is_noticed_too(tmp_path: Path) -> None:
    """What is done for the first time may take an hour, but a host may not be silent for so long."""
    with hosts_of(2, tmp_path) as hosts:
        jobs = start_all(hosts, *LONG, "data.fault=sleep", "data.seconds=600")
        wait_for_any(jobs, "plan       steps")
        time.sleep(1)
        ended = seconds_to_end(jobs, hosts.cut(2), SET_TIME_S)
        assert [job.process.returncode for job in jobs.values()] == [76, 76], ended
        assert re.search(r"^rank 1 \(pid \d+ on host2\) does not answer", jobs[1].text, re.MULTILINE)


@pytest.mark.cluster
def test_the_end_of_the_host_where_all_meet_ends_all(tmp_path: Path) -> None:
    """Elastic or not: its launch is killed, and the connections close at once."""
    with hosts_of(3, tmp_path) as hosts:
        jobs = start_all(hosts, *LONG, **ELASTIC)
        wait_for_any(jobs, "step 30/")
        began = time.monotonic()
        jobs[1].process.kill()
        ended = seconds_to_end(jobs, began, SET_TIME_S + 30)
        assert [jobs[host].process.returncode for host in (2, 3)] == [1, 1], ended
        for host in (2, 3):
            assert "the rendezvous at host1:29400 is gone" in jobs[host].text.splitlines()[-1]


@pytest.mark.cluster
def test_a_host_whose_launch_is_killed_is_named(tmp_path: Path) -> None:
    """Its ranks end with it, and their connections are closed."""
    with hosts_of(3, tmp_path) as hosts:
        jobs = start_all(hosts, *LONG)
        wait_for_any(jobs, "step 30/")
        began = time.monotonic()
        jobs[3].process.kill()
        ended = seconds_to_end(jobs, began, SET_TIME_S)
        assert [jobs[host].process.returncode for host in (1, 2)] == [1, 1], ended
    assert any("another rank at 10.77.0.3 is gone" in jobs[host].text for host in (1, 2))


@pytest.mark.cluster
def test_a_signal_to_one_host_stops_an_elastic_job_with_a_checkpoint(tmp_path: Path) -> None:
    """That ranks stop is no reason for the other hosts to go on without them."""
    with hosts_of(3, tmp_path) as hosts:
        jobs = start_all(hosts, *LONG, **ELASTIC)
        wait_for_any(jobs, "step 30/")
        jobs[2].process.send_signal(signal.SIGTERM)
        assert [job.wait(30) for job in jobs.values()] == [75, 75, 75], [job.text for job in jobs.values()]
    assert re.search(r"stopped at step \d+ and saved", jobs[1].text)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = Job(LONG, folder, 1)
    assert job.wait() == 0, job.text[-3000:]
    return folder / "run"


@pytest.mark.cluster
@pytest.mark.parametrize(("endpoint", "lost", "nnodes"), [("host1", 3, "1:3"), ("host2", 1, "2:3")])
def test_an_elastic_job_goes_on_without_a_lost_host_and_grows_again(
    tmp_path: Path, undisturbed: Path, endpoint: str, lost: int, nnodes: str
) -> None:
    """No sample is missed or seen twice: with strategy=strict it ends with the bits of a run that nothing
    happened to. The second time the host that is lost has rank 0."""
    words = [*LONG, "hang_timeout=10"]  # longer than torchrun needs to take a host for dead, as by default
    variables = {**ELASTIC, "PET_NNODES": nnodes, "PET_RDZV_ENDPOINT": f"{endpoint}:29400"}
    with hosts_of(3, tmp_path) as hosts:
        jobs = start_all(hosts, *words, **variables)
        before = wait_until_three_train(jobs)
        resumes = sum(text.count("resumed    ") for text in before.values())
        cut = hosts.cut(lost)
        resumed = wait_for_any(jobs, "resumed    ", times=resumes + 1) - cut
        assert jobs[lost].wait(SET_TIME_S + 10) == 76
        mended = hosts.mend(lost)
        again = start(hosts, lost, *words, **variables)
        every = {**jobs, 4: again}
        grown = wait_for_any(every, "resumed    ", times=resumes + 2) - mended
        assert [job.wait() for host, job in every.items() if host != lost] == [0, 0, 0], again.text
    print(f"again after {resumed:.1f} s, grown {grown:.1f} s after the link was back")
    said = "".join(job.text.removeprefix(before.get(host, "")) for host, job in every.items())
    sizes = re.findall(r"strategy   strict, 8 shards .*, (\d) ranks on (\d) nodes", said)
    assert sorted(sizes) == [("2", "2"), ("3", "3")]
    assert said.count("batch      24 global") == 2
    assert f"ddptrain launch: lost 10.77.0.{lost}: going on" in said
    for job in every.values():
        assert ": restart 1 of 5" not in job.text, "neither the loss nor the return spends one"
    assert_same_outcome(tmp_path / "run", undisturbed)


@pytest.mark.cluster
def test_a_host_in_the_loop_of_the_docs_comes_back_by_itself(tmp_path: Path, undisturbed: Path) -> None:
    page = (MULTINODE.parents[1] / "docs/hosts.md").read_text()
    [loop] = re.findall(r"^(while .*done)$", page, re.MULTILINE | re.DOTALL)
    loop = re.sub(r"launch/multinode\.sh [^;]*;", f'{MULTINODE} "$@";', loop)
    with hosts_of(2, tmp_path) as hosts:
        given = {"PET_RDZV_ENDPOINT": ENDPOINT, "PET_RDZV_ID": "job1", **ELASTIC, "PET_NNODES": "1:2"}
        jobs = {host: hosts.start(host, ["sh", "-c", loop, "sh", *LONG], **given) for host in (1, 2)}
        wait_for_any(jobs, ", 2 ranks on 2 nodes")  # a host that starts late finds the other one training
        wait_for_any(jobs, "step 30/")
        hosts.cut(2)
        jobs[2].wait_for("Start the same line again")
        hosts.mend(2)
        assert [job.wait() for job in jobs.values()] == [0, 0], [job.text for job in jobs.values()]
    said = "".join(job.text for job in jobs.values())
    sizes = re.findall(r"strategy   strict, .*, (\d) ranks? on", said)
    assert (sizes.count("2"), "1" in sizes) == (2, True)
    assert_same_outcome(tmp_path / "run", undisturbed)


@pytest.mark.cluster
def test_the_host_where_all_meet_goes_on_alone(tmp_path: Path, undisturbed: Path) -> None:
    """It keeps the rendezvous, so it alone may: the other two, though they reach each other, end."""
    with hosts_of(3, tmp_path) as hosts:
        jobs = start_all(hosts, *LONG, **ELASTIC)
        wait_for_any(jobs, "step 30/")
        cut = hosts.cut(1)
        seconds_to_end({host: jobs[host] for host in (2, 3)}, cut, SET_TIME_S)
        assert [jobs[host].process.returncode for host in (2, 3)] == [76, 76]
        assert jobs[1].wait() == 0, jobs[1].text
    assert "strategy   strict, 8 shards (equal bits on 1 to 8 ranks), 1 rank on 1 node" in jobs[1].text
    assert_same_outcome(tmp_path / "run", undisturbed)


@pytest.mark.cluster
def test_too_few_hosts_wait_for_more_and_then_end(tmp_path: Path) -> None:
    with hosts_of(3, tmp_path) as hosts:
        conf = {"PET_RDZV_CONF": "keep_alive_interval=1,join_timeout=10"}
        jobs = start_all(hosts, *LONG, **{**ELASTIC, "PET_NNODES": "3", **conf})
        wait_for_any(jobs, "step 30/")
        ended = seconds_to_end(jobs, hosts.cut(3), SET_TIME_S + 10 + 10)
    assert [job.process.returncode for job in jobs.values()] == [76, 76, 76], ended
    lines = [jobs[host].text.splitlines()[-1] for host in (1, 2)]
    assert any("too few nodes have met again at host1:29400" in line for line in lines), lines


@pytest.mark.cluster
def test_a_short_outage_is_no_fault(tmp_path: Path, undisturbed: Path) -> None:
    """Shorter than hang_timeout, but long enough for torchrun to take the host for dead."""
    with hosts_of(3, tmp_path) as hosts:
        jobs = start_all(hosts, *LONG, "hang_timeout=30", **ELASTIC)
        before = wait_until_three_train(jobs)
        hosts.cut(2)
        time.sleep(8)
        hosts.mend(2)
        assert [job.wait() for job in jobs.values()] == [0, 0, 0], [job.text for job in jobs.values()]
    assert "resumed" not in jobs[1].text.removeprefix(before[1])
    assert_same_outcome(tmp_path / "run", undisturbed)


@pytest.mark.cluster
def test_a_slow_link_that_loses_packets_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 ms each way, and one frame in a hundred lost."""
    monkeypatch.setenv("DDPTRAIN_CORES", "1")  # as many threads for ranks that share a host
    words = [f"--config-dir={FAULTY}", "recipe=faulty", "device=cpu", "run.dir=run"]
    (tmp_path / "one").mkdir()
    one = Job(words, tmp_path / "one", 2)
    assert one.wait() == 0, one.text[-3000:]
    with hosts_of(2, tmp_path, slow=2, delay=0.05, loss=0.01) as hosts:
        jobs = start_all(hosts, *words)
        assert [job.wait(280) for job in jobs.values()] == [0, 0], [job.text for job in jobs.values()]
    assert "lost 3 of" in (tmp_path / "cable-2.txt").read_text(), "the link was as bad as was asked for"
    assert_same_outcome(tmp_path / "run", tmp_path / "one/run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["verdict"].startswith("waiting for the other ranks' gradients "), summary["verdict"]
