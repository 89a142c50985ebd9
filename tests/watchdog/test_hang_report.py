"""Who is blamed when a job stands still."""

import _thread
import threading
from typing import Any

from ddptrain.distributed.watchdog.hang_report import Beat, describe, guilty, stack_of, waits


def beat(rank: int, waits: str = "engine", marks: int = 50, **changes: Any) -> Beat:
    fields = {
        "number": 9,
        "step": 12,
        "what": "backward",
        "overdue": True,
        "stack": "",
        "host": "a",
        "pid": 7,
    }
    return Beat(**{"rank": rank, "marks": marks, "waits": waits, **fields, **changes})


def blamed(*beats: Beat, silent: tuple[Beat, ...] = ()) -> list[int]:
    return [beat.rank for beat in guilty(beats, silent)]


def test_a_rank_outside_of_a_collective() -> None:
    assert blamed(beat(0), beat(1, waits=""), beat(2)) == [1]


def test_a_rank_outside_that_is_ahead_is_held_up_by_a_full_queue() -> None:
    assert blamed(beat(0, waits="", step=13, what="forward"), beat(1, waits=""), beat(2)) == [1]


def test_a_rank_that_does_not_answer_comes_before_all() -> None:
    stopped = beat(2)
    assert blamed(beat(0), beat(1, waits=""), stopped, silent=(stopped,)) == [2]


def test_a_collective_too_many_or_too_few_in_a_recipe() -> None:
    assert blamed(beat(0), beat(1, waits="recipe"), beat(2)) == [1]
    assert blamed(beat(0, waits="recipe"), beat(1), beat(2, waits="recipe")) == [1]
    assert blamed(beat(0, waits="recipe"), beat(1)) == [0, 1]  # with two, nobody knows


def test_a_rank_ahead_of_the_rest_has_left_something_out() -> None:
    assert blamed(beat(0), beat(1, what="optimizer"), beat(2)) == [1]
    assert blamed(beat(0), beat(1, step=13, what="forward")) == [1]
    assert blamed(beat(0), beat(1), beat(2)) == [0, 1, 2]


def test_where_a_thread_waits() -> None:
    ours, theirs = "/x/ddptrain/engine/loop.py", "/mine/recipe.py"
    collective, ddp = "/x/torch/distributed/distributed_c10d.py", "/x/torch/nn/parallel/distributed.py"
    assert waits([(ours, "_step"), (theirs, "loss")]) == ""
    assert waits([(ours, "_step"), (theirs, "loss"), (collective, "barrier")]) == "recipe"
    assert (
        waits([(ours, "_save"), ("/x/ddptrain/distributed/comm.py", "from_all_ranks"), (collective, "x")])
        == "engine"
    )
    assert waits([(theirs, "loss"), (ddp, "forward"), (collective, "_broadcast")]) == "engine"
    assert waits([(ours, "_step"), ("/x/torch/autograd/graph.py", "_engine_run_backward")]) == "engine"
    assert waits([("/x/torch/autograd/graph.py", "_engine_run_backward"), (theirs, "hook")]) == ""
    assert waits([]) == ""


def test_what_autograds_own_threads_run_belongs_to_the_stack() -> None:
    """A hook in a backward pass on a GPU; of other threads, which Python has started, nothing."""
    begun, over = threading.Barrier(3), threading.Event()

    def hook() -> None:
        threading.current_thread()  # as logging asks: Python then lists the thread
        begun.wait()
        over.wait()

    def other() -> None:
        begun.wait()
        over.wait()

    _thread.start_new_thread(hook, ())
    threading.Thread(target=other, daemon=True).start()
    begun.wait()
    names = [entry.name for entry in stack_of(threading.get_ident())]
    over.set()
    assert names.index("test_what_autograds_own_threads_run_belongs_to_the_stack") < names.index("hook")
    assert "other" not in names


def test_the_message_names_rank_place_and_stack() -> None:
    guilty_one = beat(1, waits="", what="forward", stack='  File "r.py", line 3, in loss\n    time.sleep(9)')
    other = beat(0, stack='  File "g.py", line 1, in _engine_run_backward\n    run()')
    text = describe([guilty_one], [other, guilty_one], [], 30)
    assert "hang_timeout=30 s" in text
    assert 'rank 1 holds it up at step 12, forward. Its stack:\n  File "r.py", line 3, in loss' in text
    assert "rank 0 waits for it at step 12, backward (_engine_run_backward)." in text
    silent = beat(1, pid=77)
    text = describe([silent], [other, silent], [silent], 30)
    assert "rank 1 (pid 77 on a) does not answer" in text


def test_the_collective_of_nccl_is_named() -> None:
    """By the ranks' flight recorders: the first that is not over, and who has not begun it."""

    def said(**by_rank: tuple[dict[str, int], tuple[str, int, str] | None]) -> str:
        beats = [
            beat(int(rank[1:]), begun=begun, pending=pending) for rank, (begun, pending) in by_rank.items()
        ]
        return describe([], beats, [], 4.0).splitlines()[-1]

    everybody = "0, default_pg"
    reduce = (everybody, 1234, "all_reduce of 4.2 MB")
    told = said(r0=({everybody: 1234}, reduce), r1=({everybody: 1233}, None), r2=({everybody: 1235}, reduce))
    expected = (
        "NCCL waits in all_reduce of 4.2 MB, number 1,234 of group 0, default_pg: rank 1 did not begin it."
    )
    assert told == expected
    assert said(r0=({everybody: 1234}, reduce), r1=({}, None), r2=({"other": 3}, None)).endswith(
        ": rank 2 did not begin it, rank 1 can't be asked."
    )
    assert said(r0=({everybody: 1234}, reduce), r1=({everybody: 1234}, reduce)).endswith(
        "all that are in it have begun it, so look at the network and the GPUs."
    )
    of_two = ("shard", 7, "all_gather of 12 bytes")
    both = {everybody: 1234, "shard": 7}
    assert "number 1,234" in said(r0=(both, reduce), r1=(both, reduce), r2=(both, of_two))
    outside = {everybody: 1234}
    told = said(r0=(both, of_two), r1=({**both, "shard": 6}, None), r2=(outside, None), r3=(outside, None))
    assert told.endswith(": rank 1 did not begin it.")
    assert "NCCL" not in said(r0=({}, None), r1=({}, None))
