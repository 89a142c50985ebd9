"""Who is blamed when a job stands still."""

from typing import Any

from ddptrain.distributed.standstill import Beat, describe, guilty, waits


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
