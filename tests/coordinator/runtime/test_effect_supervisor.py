"""The tasks of the effects that are due: their turns, retries, ends, and what is said of them."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from stratagem.common.base.errors import (
    DivergedError,
    StaleError,
    StratagemError,
    UnavailableError,
    told,
)
from stratagem.common.base.ids import Digest, Party, RunId
from stratagem.common.rpc.status_codes import from_rpc_error
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core.commands import EventSpan
from stratagem.coordinator.core.effect_failures import MAX_TRIES, TROUBLE, FailedTries, TryAgain
from stratagem.coordinator.core.effects import (
    Base,
    Build,
    CommitSegment,
    Effect,
    EvaluateState,
    RunSegment,
    TrainClient,
    slots,
)
from stratagem.coordinator.core.facts import RunReleased
from stratagem.coordinator.core.state import CoordinatorState
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.observe.feed import Feed, FeedEvent, SegmentProgress, say_what_fails
from stratagem.coordinator.runtime import supervisor as supervisor_module
from stratagem.coordinator.runtime.supervisor import RunSupervisor, stop_if_cancelled, task_group
from tests.circles import Watched, no_collector
from tests.coordinator.runtime.effects import member, segment
from tests.patience import PATIENCE_S

RUN = RunId("run-1")
ROOT = Party("")


async def never(effect: Effect, tries: FailedTries) -> None:
    raise AssertionError(f"{effect} is given up: {tries.reason}")


async def until(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await event.wait()


@pytest.fixture(autouse=True)
def unread() -> Iterator[None]:
    """Nobody reads the tracebacks of defects here, which take a second each to draw."""
    with capture_logs():
        yield


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is tried again at once."""
    monkeypatch.setattr(supervisor_module, "FIRST_RETRY_S", 1e-4)
    monkeypatch.setattr(supervisor_module, "LAST_RETRY_S", 1e-4)


class Performed:
    """Effects that were started and not cancelled."""

    def __init__(self) -> None:
        self.running: set[Effect] = set()
        self.changed = asyncio.Event()

    async def __call__(self, effect: Effect) -> None:
        self.running.add(effect)
        self.changed.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.running.discard(effect)
            self.changed.set()

    async def until(self, expected: set[Effect]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.running != expected:
                self.changed.clear()
                await self.changed.wait()


async def test_supervisor_runs_what_is_due_and_nothing_else() -> None:
    """A party that has been formed anew keeps its turn."""
    performed = Performed()
    supervisor = RunSupervisor(performed, never)
    first, second = segment("x", "a", "b"), segment("y", "b", "c")
    supervisor.reconcile(frozenset({first}))
    supervisor.reconcile(frozenset({first, second}))
    await performed.until({first})
    assert supervisor.num_waiting == 1
    reformed = segment("x", "b", membership=2)
    supervisor.reconcile(frozenset({reformed, second}))
    await performed.until({reformed})
    supervisor.yield_slots(reformed)
    await performed.until({reformed, second})
    supervisor.reconcile(frozenset({second}))
    await performed.until({second})
    await supervisor.close()
    assert performed.running == set()
    assert slots(evaluation(1)) == {member("a")}
    assert not slots(commit(1))


async def test_watchers_are_told_what_keeps_failing() -> None:
    async def no_history(run_id: RunId, span: EventSpan, _num_events: int) -> list[FeedEvent]:
        return []

    feed, is_told = Feed(no_history), asyncio.Event()
    feed.add_event(RUN, FeedEvent(0, 0.0, RunReleased(), RunPhase.RUNNING), is_last=False)

    async def fail(effect: Effect) -> None:
        raise ZeroDivisionError("a defect")

    def on_trouble(effect: Effect, tries: FailedTries) -> None:
        say_what_fails(feed, CoordinatorState(BUILT_IN), effect, tries)
        is_told.set()

    supervisor = RunSupervisor(fail, never, on_trouble)
    build = Build(RUN, ROOT, 1, member("a"))
    supervisor.reconcile(frozenset({build}))
    await until(is_told)
    await supervisor.close()
    shown = feed.progress(RUN)
    assert supervisor.num_failures["Build"] == TROUBLE
    assert shown is not None
    moment = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    assert re.fullmatch(
        r"Build on a keeps failing and is tried again: ZeroDivisionError: a defect "
        rf"\(tried 6 of 20 times since {moment}, next at {moment}; the log of a says more\)",
        shown.reason,
    )
    feed.set_progress(RUN, SegmentProgress(5, 0.1, 1.0))  # it trains on meanwhile
    assert feed.trouble(RUN) == shown.reason
    feed.add_event(RUN, FeedEvent(1, 0.0, RunReleased(), RunPhase.RUNNING), is_last=False)
    assert feed.trouble(RUN) == ""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("error", "num_tries"), [(DivergedError("inf"), 1), (KeyError("x"), MAX_TRIES)]
)
async def test_what_cannot_be_mended_is_given_up_and_reported_until_it_is_not_due(
    error: Exception, num_tries: int
) -> None:
    """The first report does not reach the journal: it is made again, and the effect is not."""
    done, ended = Counter[str](), asyncio.Event()

    async def fail(effect: Effect) -> None:
        done["tries"] += 1
        raise error

    async def give_up(effect: Effect, tries: FailedTries) -> None:
        done["reports"] += 1
        if done["reports"] == 1:
            raise UnavailableError("the journal cannot be used now")
        assert (tries.num, tries.reason) == (num_tries, told(error))
        supervisor.reconcile(frozenset())
        ended.set()

    supervisor = RunSupervisor(fail, give_up)
    supervisor.reconcile(frozenset({segment("x", "a")}))
    await until(ended)
    await supervisor.close()
    assert done == {"tries": num_tries, "reports": 2}


@pytest.mark.usefixtures("quick")
async def test_members_that_change_do_not_make_a_defect_another_one() -> None:
    """Each failure forms the party anew, so that the segment is another effect each time."""
    ended, tried = asyncio.Event(), list[int]()

    async def fail(effect: Effect) -> None:
        assert isinstance(effect, RunSegment)
        tried.append(effect.membership)
        asyncio.get_running_loop().call_soon(reform)  # once this failure is counted
        raise KeyError("x")

    def reform() -> None:
        if not ended.is_set():
            supervisor.reconcile(frozenset({segment("x", "a", membership=len(tried))}))

    async def give_up(effect: Effect, tries: FailedTries) -> None:
        ended.set()
        supervisor.reconcile(frozenset())

    supervisor = RunSupervisor(fail, give_up)
    reform()
    await until(ended)
    await supervisor.close()
    assert tried == [*range(MAX_TRIES)]


def training(client: int, worker: str, round_num: int = 1) -> TrainClient:
    base, of_round = Base(0, 0, Digest("d")), (round_num, client, 2, 1)
    return TrainClient(RUN, ROOT, 1, *of_round, member(worker), base)


def evaluation(segment: int) -> EvaluateState:
    base = Base(segment, segment, Digest("d"))
    return EvaluateState(RUN, ROOT, 1, base, ("test",), (member("a"),))


def commit(step: int) -> CommitSegment:
    return CommitSegment(RUN, ROOT, 1, step, 1, ((member("a"),),))


NEXT: dict[str, tuple[Effect, Effect]] = {
    "another client": (training(0, "a"), training(1, "a")),
    "another round": (training(0, "a"), training(0, "a", round_num=2)),
    "another state to evaluate": (evaluation(1), evaluation(2)),
    "a later step of the segment": (commit(10), commit(20)),
    "given up elsewhere": (training(0, "a"), training(0, "b")),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("case", "succeeds"),
    [*((case, case != "given up elsewhere") for case in NEXT), ("another client", False)],
)
async def test_failures_of_other_work_do_not_count(case: str, succeeds: bool) -> None:
    """The fact that ends the first effect removes it while it is still performed or given up, and
    what is due next is tried as often as the first."""
    first, second = NEXT[case]
    tried, ended = Counter[Effect](), asyncio.Event()

    async def fail(effect: Effect) -> None:
        tried[effect] += 1
        if succeeds and effect == first and tried[first] == MAX_TRIES - 1:
            supervisor.reconcile(frozenset({second}))
            await asyncio.Event().wait()
        raise StratagemError("x")

    async def give_up(effect: Effect, tries: FailedTries) -> None:
        supervisor.reconcile(frozenset({second} if effect == first else ()))
        if effect == second:
            ended.set()
        await asyncio.Event().wait()

    supervisor = RunSupervisor(fail, give_up)
    supervisor.reconcile(frozenset({first}))
    await until(ended)
    await supervisor.close()
    assert tried == {first: MAX_TRIES - succeeds, second: MAX_TRIES}


async def test_failures_of_what_waits_for_slots_go_on_with_it_or_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_RETRY_S", 60.0)
    monkeypatch.setattr(supervisor_module, "LAST_RETRY_S", 60.0)
    has_failed = asyncio.Event()

    async def fail(effect: Effect) -> None:
        if isinstance(effect, RunSegment):
            await asyncio.Event().wait()
        asyncio.get_running_loop().call_soon(has_failed.set)
        raise StratagemError("x")

    supervisor = RunSupervisor(fail, never)
    rival = segment("y", "b")
    supervisor.reconcile(frozenset({training(0, "a"), rival}))
    await has_failed.wait()
    queued = training(0, "b")
    supervisor.reconcile(frozenset({queued, rival}))
    assert [*supervisor._failed] == [queued]
    has_failed.clear()
    supervisor.reconcile(frozenset({training(0, "c"), rival}))
    await has_failed.wait()
    assert [tries.num for tries in supervisor._failed.values()] == [2]
    supervisor.reconcile(frozenset({queued, rival}))
    supervisor.reconcile(frozenset({rival}))
    assert not supervisor._failed
    await supervisor.close()


def of_grpc(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "http status 500")


def told_by(code: grpc.StatusCode) -> StratagemError:
    error = from_rpc_error(of_grpc(code))
    error.__cause__ = of_grpc(code)
    return error


@pytest.mark.parametrize(
    ("error", "retry"),
    [
        *((of_grpc(code), TryAgain.ENDLESS) for code in supervisor_module._OF_PROXIES),
        (told_by(next(iter(supervisor_module._OF_PROXIES))), TryAgain.ENDLESS),
        (grpc.aio.UsageError("Channel is closed."), TryAgain.ENDLESS),
        (grpc.aio.UsageError("Async iterator is not an iterator."), TryAgain.LIMITED),
        (of_grpc(grpc.StatusCode.INTERNAL), TryAgain.LIMITED),
        (told_by(grpc.StatusCode.INTERNAL), TryAgain.LIMITED),
    ],
)
async def test_outages_of_grpc_and_of_proxies_are_waited_for(
    error: Exception, retry: TryAgain
) -> None:
    effect, has_failed = segment("x", "a"), asyncio.Event()

    async def fail(_effect: Effect) -> None:
        asyncio.get_running_loop().call_soon(has_failed.set)
        raise error

    supervisor = RunSupervisor(fail, never)
    supervisor.reconcile(frozenset({effect}))
    await has_failed.wait()
    assert supervisor._failed[effect].retry is retry
    await supervisor.close()


async def test_effect_that_fails_while_it_is_cancelled_is_not_tried_again() -> None:
    attempts: list[asyncio.Task[None]] = []
    begun = asyncio.Event()

    async def fail_at_the_end(effect: Effect) -> None:
        this = asyncio.current_task()
        assert this is not None
        attempts.append(this)
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise StaleError("what a TaskGroup makes of both") from None

    supervisor = RunSupervisor(fail_at_the_end, never)
    supervisor.reconcile(frozenset({segment("x", "a")}))
    await begun.wait()
    supervisor.reconcile(frozenset())
    await asyncio.wait(attempts, timeout=PATIENCE_S)
    assert [task.cancelled() for task in attempts] == [True]


class Lingering:
    """An effect that cleans up, until it may end."""

    def __init__(self) -> None:
        self.has_begun, self.cleans_up, self.may_end = (asyncio.Event() for _ in range(3))
        self.has_ended = False

    async def __call__(self, effect: Effect) -> None:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cleans_up.set()
            await self.may_end.wait()
            self.has_ended = True


@pytest.mark.parametrize("is_due", [True, False])
async def test_a_closed_supervisor_has_nothing_running(is_due: bool) -> None:
    lingering = Lingering()
    supervisor = RunSupervisor(lingering, never)
    supervisor.reconcile(frozenset({segment("x", "a")}))
    await lingering.has_begun.wait()
    if not is_due:
        supervisor.reconcile(frozenset())
    closing = asyncio.create_task(supervisor.close())
    await lingering.cleans_up.wait()
    assert not closing.done()
    lingering.may_end.set()
    await closing
    assert lingering.has_ended


async def test_an_effect_that_does_not_end_is_named_and_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "GRACE_S", 0.01)
    lingering = Lingering()
    supervisor = RunSupervisor(lingering, never)
    supervisor.reconcile(frozenset({segment("x", "a")}))
    await lingering.has_begun.wait()
    with capture_logs() as said:
        await supervisor.close()
    assert [(each["event"], each["effect"]) for each in said] == [
        ("effect does not end", "RunSegment x")
    ]
    (left,) = [task for task in asyncio.all_tasks() if task.get_name() == "RunSegment x"]
    lingering.may_end.set()
    await asyncio.wait([left])


async def test_an_effect_whose_call_is_cancelled_under_it_is_tried_again() -> None:
    """Which is what gRPC does to the calls on a channel that somebody closes."""
    attempts: list[Effect] = []
    again = asyncio.Event()

    async def call(effect: Effect) -> None:
        attempts.append(effect)
        if len(attempts) > 1:
            again.set()
            await asyncio.Event().wait()
        async with task_group() as group:
            waiting = group.create_task(asyncio.Event().wait())
            asyncio.get_running_loop().call_soon(waiting.cancel)
            await waiting

    supervisor = RunSupervisor(call, never)
    supervisor.reconcile(frozenset({segment("x", "a")}))
    await until(again)
    await supervisor.close()
    assert supervisor.num_failures["RunSegment"] == 1


async def test_what_an_effect_has_held_is_freed_when_it_is_stopped() -> None:
    """The task keeps its cancellation, and that its frames, in which is what knows the task."""
    held, begun = Watched(), asyncio.Event()

    async def call(effect: Effect) -> None:
        thing = held.watch(Performed())
        async with task_group() as group:
            group.create_task(asyncio.Event().wait())
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                stop_if_cancelled()
        assert thing.running

    supervisor = RunSupervisor(call, never)
    with no_collector():
        supervisor.reconcile(frozenset({segment("x", "a")}))
        await until(begun)
        supervisor.reconcile(frozenset())
        await held.until_freed()
    await supervisor.close()


async def test_a_defect_is_logged_without_the_groups_around_it() -> None:
    """And not at all where the effect has been given up: nobody tries it again."""
    attempts: list[Effect] = []
    again = asyncio.Event()

    async def fail(effect: Effect) -> None:
        attempts.append(effect)
        async with task_group() as group:
            group.create_task(fail_in_a_task())

    async def fail_in_a_task() -> None:
        try:
            if len(attempts) > 1:
                again.set()
                await asyncio.Event().wait()
        finally:
            raise ZeroDivisionError(f"a defect of attempt {len(attempts)}")

    supervisor = RunSupervisor(fail, never)
    with capture_logs() as said:
        supervisor.reconcile(frozenset({segment("x", "a")}))
        await until(again)
        await supervisor.close()
    assert [(each["event"], repr(each["exc_info"])) for each in said] == [
        ("effect raised", "ZeroDivisionError('a defect of attempt 1')")
    ]
