"""The rules about a thread that stays at one thing, with stacks and times as literals."""

import pytest

from stratagem.worker.host.stalls import (
    StackFrame,
    StallCause,
    StallLimits,
    ThreadStay,
    cause_of,
    counted_s,
    is_compiling,
    is_due_again,
)

pytestmark = pytest.mark.core

LIBRARY = "/opt/python/lib/python3.11"
LOCK = StackFrame("threading", f"{LIBRARY}/threading.py", 320, "wait")
TORCH = StackFrame("torch.nn", f"{LIBRARY}/site-packages/torch/nn/linear.py", 125, "forward")
MODEL = StackFrame("my.models", "/home/me/my/models.py", 41, "forward")
PLAN = "worker.plans.train"


def ours(*names: str) -> list[StackFrame]:
    """Frames of our own modules, innermost first, down to the plan."""
    files = [(f"stratagem.{name}", f"/src/{name.replace('.', '/')}.py") for name in (*names, PLAN)]
    return [StackFrame(module, file, 7, "run") for module, file in files]


ENGINE = ours("worker.engine.forward_backward")
SHARED = ours("worker.exchange.shm_all_reduce", "worker.exchange.reducer")
LINK = ours("worker.mesh.mailbox", "worker.exchange.transfer_thread")
STAGE = ours("worker.mesh.mailbox", "worker.pipeline.messages", "worker.pipeline.rank_pass")
SERVER = ours("worker.exchange.parameter_server", "worker.exchange.reducer")
MEETING = ours("worker.session.control", "worker.party.rendezvous", "worker.party.join")
BLOB = ours("worker.session.control", "worker.session.context")
READERS = ours("worker.data.readers", "worker.data.datasets")


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


def test_a_few_members_are_named() -> None:
    """Where there are none, nobody else is to blame."""
    told = [cause_of([LOCK, *SHARED], list(others)).awaits for others in ("", "bcd", "bcde")]
    exchange = "in the exchange of a step"
    assert told == ["", f"b, c, d {exchange}", f"the other members {exchange}"]


def test_a_stay_is_long_beyond_the_limit_and_beyond_what_is_usual() -> None:
    stay = ThreadStay(num_moves=1, since_s=0.0)
    assert stay.seen(1, 50.0) is stay
    assert (stay.is_long(59.0, 60.0), stay.is_long(60.0, 60.0)) == (False, True)
    stay = stay.seen(5, 50.0)
    assert (stay.since_s, stay.longest_s) == (50.0, 50.0)
    assert (stay.is_long(149.0, 60.0), stay.is_long(150.0, 60.0)) == (False, True)


@pytest.mark.parametrize(
    ("since_s", "longest_s", "last_s"),
    [
        (0.0, 0.0, 130.0),  # it was there before others came to wait
        (110.0, 0.0, 140.0),
        (1000.0, 0.0, 1030.0),  # it has moved on all the time
        (0.0, 40.0, 180.0),  # it usually stays longer than the grace
    ],
)
def test_a_thread_that_others_wait_for_is_given_up_once_it_has_not_moved_for_the_grace(
    since_s: float, longest_s: float, last_s: float
) -> None:
    stay = ThreadStay(1, since_s, longest_s)
    assert not stay.is_hopeless(last_s - 1.0, 30.0, wanted_s=100.0)
    assert stay.is_hopeless(last_s, 30.0, wanted_s=100.0)


@pytest.mark.parametrize(
    ("is_run_over", "has_stepped", "compiles", "patience_s"),
    [
        (True, False, False, 30.0),  # it was cancelled, and never comes back
        (False, True, False, 30.0),
        (False, False, False, 930.0),  # its round was closed: it would be late again for ever
        (True, True, True, 930.0),
    ],
)
def test_a_first_step_of_a_run_that_goes_on_and_a_compiler_are_given_more_time(
    is_run_over: bool, has_stepped: bool, compiles: bool, patience_s: float
) -> None:
    found = StallLimits().patience_s(
        is_run_over=is_run_over, has_stepped=has_stepped, is_compiling=compiles
    )
    assert found == patience_s


def test_what_compiles_is_told_from_what_runs_compiled() -> None:
    library = f"{LIBRARY}/site-packages/torch/_dynamo"
    runs = StackFrame("torch._dynamo.eval_frame", f"{library}/eval_frame.py", 5, "compile_wrapper")
    compiles = StackFrame("torch._dynamo.convert_frame", f"{library}/convert_frame.py", 5, "call")
    assert not is_compiling([MODEL, runs, *ENGINE])
    assert is_compiling([LOCK, compiles, runs, *ENGINE])


def test_a_stall_is_told_again_when_it_has_grown_by_time_in_which_the_process_ran() -> None:
    assert (is_due_again(60.0, 0.0), is_due_again(89.0, 60.0)) == (True, False)
    assert is_due_again(90.0, 60.0)
    assert (counted_s(1.5, 1.0), counted_s(3600.0, 1.0)) == (1.5, 10.0)
