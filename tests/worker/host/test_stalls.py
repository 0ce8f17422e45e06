"""The rules about a thread that stays at one thing, with stacks and times as literals."""

import pytest

from stratagem.worker.host.stalls import (
    StackFrame,
    StallCause,
    StallLimits,
    ThreadStay,
    cause_of,
    is_due_again,
)

pytestmark = pytest.mark.core

LIBRARY = "/opt/python/lib/python3.11"
LOCK = StackFrame("threading", f"{LIBRARY}/threading.py", 320, "wait")
TORCH = StackFrame("torch.nn", f"{LIBRARY}/site-packages/torch/nn/linear.py", 125, "forward")
MODEL = StackFrame("my.models", "/home/me/my/models.py", 41, "forward")
PLAN = "worker.plans.train_plan"


def ours(*names: str) -> list[StackFrame]:
    """Frames of our own modules, innermost first, down to the plan."""
    files = [(f"stratagem.{name}", f"/src/{name.replace('.', '/')}.py") for name in (*names, PLAN)]
    return [StackFrame(module, file, 7, "run") for module, file in files]


ENGINE = ours("worker.engine.step.forward_backward")
SHARED = ours("worker.exchange.all_reduce.shm_all_reduce", "worker.exchange.reducer")
LINK = ours("worker.mesh.mailbox", "worker.exchange.buckets.transfer_thread")
STAGE = ours("worker.mesh.mailbox", "worker.pipeline.peer_transport", "worker.pipeline.rank_pass")
SERVER = ours("worker.exchange.parameter_server.server_transport", "worker.exchange.reducer")
MEETING = ours("worker.session.plan_control", "worker.party.join_rendezvous", "worker.party.join")
BLOB = ours("worker.session.plan_control", "worker.session.context")
READERS = ours("worker.data.reader.reader_pool", "worker.data.datasets")


@pytest.mark.parametrize(
    ("stack", "place", "awaits"),
    [
        ([MODEL, TORCH, *ENGINE], "models.py, line 41, in forward", ""),
        ([LOCK, MODEL, *ENGINE], "models.py, line 41, in forward", ""),  # a lock of the user's
        ([TORCH, MODEL, *ENGINE], "models.py, line 41, in forward", ""),
        ([TORCH, *ENGINE], "linear.py, line 125, in forward", ""),  # a library's model
        ([LOCK, *SHARED, TORCH, MODEL, *ENGINE], "", "b in the exchange of a step"),  # in a hook
        ([LOCK, *LINK], "", "b in the exchange of a step"),
        ([LOCK, *STAGE], "", "b in a step of the pipeline"),
        ([LOCK, *SERVER], "", "the coordinator to add up a step"),
        ([LOCK, *MEETING], "", "b to join"),
        ([LOCK, *BLOB], "", "a state or data from the coordinator"),
        ([LOCK, *READERS], "in the processes that read rows, data.readers", ""),
        ([LOCK], "threading.py, line 320, in wait", ""),
        ([], "", ""),
    ],
)
def test_the_innermost_frame_that_is_the_users_or_ours_says_why(
    stack: list[StackFrame], place: str, awaits: str
) -> None:
    assert cause_of(stack, ["b"]) == StallCause(place, awaits)


@pytest.mark.parametrize(
    ("others", "awaits"),
    [
        ([], ""),  # then nobody else is to blame
        (["b", "c", "d"], "b, c, d in the exchange of a step"),
        (["b", "c", "d", "e"], "the other members in the exchange of a step"),
    ],
)
def test_a_few_members_are_named(others: list[str], awaits: str) -> None:
    assert cause_of([LOCK, *SHARED], others).awaits == awaits


def test_a_stay_is_long_beyond_the_limit_and_beyond_what_is_usual() -> None:
    stay = ThreadStay(num_moves=1, since_s=0.0)
    assert stay.seen(1, 50.0) is stay
    assert (stay.is_long(59.0, 60.0), stay.is_long(60.0, 60.0)) == (False, True)
    stay = stay.seen(5, 50.0)
    assert (stay.since_s, stay.longest_s) == (50.0, 50.0)
    assert (stay.is_long(149.0, 60.0), stay.is_long(150.0, 60.0)) == (False, True)


@pytest.mark.parametrize(
    ("since_s", "longest_s", "ended_s", "last_s"),
    [
        (0.0, 0.0, 100.0, 130.0),  # it has not moved for the grace
        (110.0, 0.0, 100.0, 140.0),
        (210.0, 0.0, 100.0, 220.0),  # it moves, and has not ended for four times as long
        (0.0, 40.0, 100.0, 180.0),  # it usually stays longer than the grace
        (0.0, 0.0, None, 60.0),  # nobody has ended it, and nobody attends it
        (0.0, 40.0, None, 80.0),
    ],
)
def test_a_thread_that_is_wanted_back_is_given_up_after_a_bounded_time(
    since_s: float, longest_s: float, ended_s: float | None, last_s: float
) -> None:
    stay, limits = ThreadStay(1, since_s, longest_s), StallLimits(report_s=60.0, grace_s=30.0)
    assert not stay.is_hopeless(last_s - 1.0, limits, ended_s=ended_s)
    assert stay.is_hopeless(last_s, limits, ended_s=ended_s)


def test_a_stall_is_told_again_when_it_has_grown() -> None:
    assert (is_due_again(60.0, 0.0), is_due_again(89.0, 60.0)) == (True, False)
    assert is_due_again(90.0, 60.0)
