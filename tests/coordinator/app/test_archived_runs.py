"""Ended runs leave the memory of the coordinator, and nobody can tell from its answers.

The reference is the pure core, which forgets nothing; see tests/coordinator/core/simulation.py.
"""

import asyncio
import tempfile
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import NotFoundError
from stratagem.common.base.ids import Digest, RunId
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import Purpose, build_manifest
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.app.storage import Storage
from stratagem.coordinator.core.commands import (
    CancelRun,
    Command,
    DeleteRun,
    EventSpan,
    LoseWorker,
    PinRun,
    Report,
    ReportTrouble,
    ResumeRun,
    SubmitRun,
)
from stratagem.coordinator.core.fact_text import decode
from stratagem.coordinator.core.facts import (
    ROOT,
    ErrorRecord,
    Evaluated,
    ModelBuilt,
    RunFailed,
    RunReleased,
    RunSubmitted,
    SegmentCommitted,
    SegmentFinished,
)
from stratagem.coordinator.core.pending import live_blobs
from stratagem.coordinator.core.strategy_contract import Strategies
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.service.queries import Runs
from stratagem.coordinator.service.streams import download, which
from stratagem.v1.coordinator_pb2 import (
    RUN_PHASE_CANCELLED,
    RUN_PHASE_COMPLETED,
    DownloadStateResponse,
)
from tests.circles import Watched, no_collector
from tests.coordinator.app.journal_tables import change, of_run
from tests.coordinator.app.twins import Twins, twins
from tests.coordinator.core.jobs import (
    DATA_PARALLEL,
    EVALUATION,
    FEDERATED,
    LOCAL,
    POPULATION_SECTIONS,
    job_text,
    population,
)
from tests.coordinator.core.raising_strategies import raising
from tests.coordinator.core.simulation import RUN, member, register, start
from tests.coordinator.open_gate import decides, leading
from tests.settings import coordinator_settings

pytestmark = pytest.mark.usefixtures("timeless")

JOBS = {
    "local": job_text(LOCAL, evaluation=EVALUATION, retention=1),
    "parallel": job_text(DATA_PARALLEL),
    "federated": job_text(FEDERATED),
    "population": job_text(population(), **POPULATION_SECTIONS),
    "inline": job_text(LOCAL, data={"inline": "ab" * 32}),
}
ERROR = RunFailed(
    reason="it raised",
    error=ErrorRecord(
        type="ValueError", message="no", traceback="...", worker_id="a", activity="step"
    ),
)


async def complete(both: Twins, name: str) -> None:
    """Let a run of the job of that name end by itself."""
    await both.tell(SubmitRun(RUN, JOBS[name], 1.0, by="client alice"))
    await both.work()


@pytest.mark.parametrize("name", JOBS)
async def test_a_run_of_each_kind_is_shown_as_before_and_read_no_more(
    tmp_path: Path, name: str
) -> None:
    async with twins(tmp_path, "a", "b", "c") as both:
        await complete(both, name)
        assert both.loop.state.ended[RUN].ended is RunPhase.COMPLETED
        assert not both.loop.state.runs
        await both.agree()
        await both.restart()
        assert await both.loop.recorded.runs() == ([both.loop.state.ended[RUN]], [RunId("")])
        await both.agree()
        read = await both.loop.recorded.read(RUN, EventSpan(), 1000)
        assert [each.index for each in read] == list(range(min(100, of_run(both.path, "event"))))


async def test_its_states_are_downloaded_after_a_restart_and_collected_once_it_is_deleted(
    tmp_path: Path,
) -> None:
    manifest = build_manifest([("x", "float32", (1,))], Purpose.STATE)
    blobs = Storage.open(coordinator_settings(data_dir=tmp_path)).blobs(1)
    simulation = start(job_text(LOCAL, evaluation=EVALUATION, retention=1), "a")
    simulation.run()
    stored: dict[str, Digest] = {}
    async with twins(tmp_path, "a") as both:
        for _, kind, payload, _ in simulation.journal:
            fact = decode(kind, 1, payload)
            if isinstance(fact, RunSubmitted):
                await both.loop.submit(SubmitRun(RUN, fact.job_json, 1.0))
            elif isinstance(fact, ModelBuilt | SegmentCommitted):
                writer = blobs.writer(len(header_bytes(manifest)) + 4)
                segment = str(getattr(fact, "segment", 0))
                writer.write(header_bytes(manifest) + segment.encode().rjust(4, b"#"))
                digest = stored[segment] = writer.commit()
                await both.loop.submit(Report(RUN, fact.model_copy(update={"digest": digest})))
            elif isinstance(fact, SegmentFinished | Evaluated | RunReleased):
                await both.loop.submit(Report(RUN, fact))
        assert both.loop.state.ended[RUN].ended is RunPhase.COMPLETED
    async with leading(tmp_path, decides) as app:
        final, view = max(stored, key=int), await Runs(app).view(RUN)
        assert [commit.is_final for commit in view.commits] == [True]
        for name in ("", "final", "best", final):
            assert which(view, name) == stored[final]
        with pytest.raises(NotFoundError, match=f"no state '0'; kept are final, best, {final}"):
            which(view, "0")
        app.blobs.collect(live_blobs(app.loop.state), 0.0)
        received: list[Any] = [
            part async for part in download(app.blobs, stored[final], 0, DownloadStateResponse)
        ]
        assert f"###{final}".encode() in b"".join(received[1:]), "behind the manifest"
        with pytest.raises(NotFoundError):
            await anext(download(app.blobs, stored["0"], 0, DownloadStateResponse))
        await app.loop.submit(DeleteRun(RUN))
        app.blobs.collect(live_blobs(app.loop.state), 0.0)
        with pytest.raises(NotFoundError):
            await anext(download(app.blobs, stored[final], 0, DownloadStateResponse))


async def test_watchers_of_a_run_that_goes_on_stay_after_a_restart(tmp_path: Path) -> None:
    async with twins(tmp_path) as both:
        await both.tell(SubmitRun(RUN, job_text(LOCAL), 1.0))
    async with leading(tmp_path, decides) as app:
        num_events = app.loop.state.runs[RUN].num_shown
        watched = app.feed.watch(RUN, EventSpan(), num_events)
        seen: list[Any] = [await anext(watched) for _ in range(num_events)]
        assert [event.index for event in seen] == list(range(num_events))
        # A watcher that is told the end here would ask again and again until something happens.
        waiting: asyncio.Future[Any] = asyncio.ensure_future(anext(watched, None))
        await app.loop.submit(CancelRun(RUN))
        event = await waiting
        assert event is not None
        assert event.index == num_events


async def test_a_run_that_comes_to_rest_while_others_are_read_is_listed(tmp_path: Path) -> None:
    other = RunId("other")
    async with twins(tmp_path, "a") as both:
        await complete(both, "local")
        await both.tell(SubmitRun(other, JOBS["parallel"], 2.0))  # waits for workers
    async with leading(tmp_path, decides) as app:
        read = app.loop.recorded.views

        async def while_it_ends(run_ids: Collection[RunId]) -> Any:
            if other in app.loop.state.runs:
                await app.loop.submit(CancelRun(other))
                await app.loop.submit(Report(other, RunReleased()))
            assert other in app.loop.state.ended
            return await read(run_ids)

        app.loop.recorded.views = while_it_ends  # type: ignore[method-assign]
        page = await Runs(app).page("")
        assert [(each.run_id, each.phase) for each in page.runs] == [
            (other, RUN_PHASE_CANCELLED),
            (RUN, RUN_PHASE_COMPLETED),
        ]


async def test_the_error_of_a_refused_command_is_freed_with_it(tmp_path: Path) -> None:
    errors = Watched()
    async with twins(tmp_path) as both:
        with no_collector():
            try:
                await both.loop.submit(CancelRun(RUN))
            except NotFoundError as error:
                errors.watch(error)
            with suppress(NotFoundError):  # the loop keeps its newest command
                await both.loop.submit(CancelRun(RUN))
            await errors.until_freed()


LOST: dict[str, Callable[[Path], None]] = {
    "none was written": lambda path: change(path, "DELETE FROM summary"),
    "another version's": lambda path: change(path, "UPDATE summary SET version = '9', brief = '?'"),
    "older than the run": lambda path: change(path, "UPDATE summary SET position = position - 1"),
}


@pytest.mark.parametrize("how", LOST)
async def test_a_summary_that_does_not_hold_is_made_anew_from_the_facts(
    tmp_path: Path, how: str
) -> None:
    async with twins(tmp_path, "a") as both:
        await complete(both, "local")
        LOST[how](both.path)
        assert (await both.loop.recorded.runs())[0] == []
        await both.restart()
        await both.agree()
        assert (await both.loop.recorded.runs())[0] == [both.loop.state.ended[RUN]]


async def test_a_run_that_was_resumed_by_who_knows_no_summaries_goes_on(tmp_path: Path) -> None:
    """A coordinator of the version before, which stood by while this one led."""
    async with twins(tmp_path, "a") as both:
        await both.tell(SubmitRun(RUN, JOBS["local"], 1.0))
        await both.tell(CancelRun(RUN))
        await both.work()
        assert RUN in both.loop.state.ended
        change(both.path, "CREATE TABLE kept AS SELECT * FROM summary")
        await both.tell(ResumeRun(RUN))
        change(both.path, "INSERT OR REPLACE INTO summary SELECT * FROM kept")
        await both.restart()
        assert RUN in both.loop.state.runs
        await both.agree()
        await both.work()
        await both.agree()
        assert both.loop.state.ended[RUN].ended is RunPhase.COMPLETED


async def test_the_name_of_a_deleted_run_is_free_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    async with twins(tmp_path, "a") as both:
        await complete(both, "inline")
        await both.restart()
        await both.tell(DeleteRun(RUN))
        assert (of_run(both.path, "event"), of_run(both.path, "summary")) == (0, 0)
        assert live_blobs(both.loop.state) == frozenset()
        await both.tell(SubmitRun(RUN, JOBS["local"], 2.0))
        await both.agree()


async def test_what_an_absent_strategy_left_is_read_again(tmp_path: Path) -> None:
    async with twins(tmp_path, "a") as both:
        await both.tell(SubmitRun(RUN, JOBS["inline"], 1.0))
        await both.work(2)
        await both.restart(Strategies({}))
        await both.tell(register("b"))
        assert both.loop.state.runs[RUN].ended is RunPhase.FAILED, "not at rest"
        await both.restart(BUILT_IN)
        await both.work()
        await both.agree()
        assert both.loop.state.ended[RUN].ended is RunPhase.FAILED
        await both.restart(Strategies({}))
        assert RUN in both.loop.state.ended, "what was summed up with it stays"


async def test_what_a_strategy_raised_about_is_read_again_by_a_mended_one(tmp_path: Path) -> None:
    broken = raising("transition")
    async with twins(tmp_path, "a", strategies=broken) as both:
        await complete(both, "inline")
        assert both.loop.state.runs[RUN].ended is RunPhase.FAILED
        await both.agree()
        await both.restart(BUILT_IN)
        assert both.loop.state.runs[RUN].ended is None
        await both.work()
        await both.agree()
        assert both.loop.state.ended[RUN].ended is RunPhase.COMPLETED


NAMES = ("r-1", "r-2")
COMMANDS: dict[str, Callable[[RunId], Command]] = {
    "submit": lambda run_id: SubmitRun(run_id, JOBS["local"], 1.0),
    "submit another": lambda run_id: SubmitRun(run_id, JOBS["parallel"], 2.0),
    "cancel": CancelRun,
    "resume": ResumeRun,
    "delete": DeleteRun,
    "pin": lambda run_id: PinRun(run_id, True),
    "unpin": lambda run_id: PinRun(run_id, False),
    "fail": lambda run_id: Report(run_id, ERROR),
    "release": lambda run_id: Report(run_id, RunReleased()),
    "trouble": lambda run_id: ReportTrouble(run_id, ROOT, 1, "cut off"),
    "lose": lambda _: LoseWorker(member("a"), "silent"),
    "register": lambda _: register("a"),
}
Action = tuple[str, int]
ACTIONS = st.tuples(
    st.sampled_from([*COMMANDS, "work", "work", "work much", "again", "restart"]), st.integers(0, 1)
)


async def play(folder: Path, actions: Iterable[Action]) -> None:
    async with twins(folder, "a", "b") as both:
        for name, which in actions:
            match name:
                case "work":
                    await both.work(3)
                case "work much":
                    await both.work(40)
                case "again":  # a message that comes late
                    await both.tell(both.told[(7 * which + 3) % len(both.told)])
                case "restart":
                    await both.restart()
                case _:
                    await both.tell(COMMANDS[name](RunId(NAMES[which])))
            await both.agree()


async def test_every_command_is_answered_about_a_run_at_rest(tmp_path: Path) -> None:
    asked = [(name, 0) for name in (*COMMANDS, "again") if name not in ("delete", "resume")]
    begun = [("submit", 0), ("work", 0)]
    stopped = [*begun, ("cancel", 0), ("work much", 0), *asked, ("restart", 0), *asked]
    resumed = [("resume", 0), ("cancel", 0), ("resume", 0), ("work much", 0), *asked, ("resume", 0)]
    await play(tmp_path, [*stopped, *resumed, ("delete", 0), *begun, ("delete", 0)])


@pytest.mark.sweep
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(actions=st.lists(ACTIONS, min_size=3, max_size=25))
async def test_nobody_can_tell_which_runs_are_at_rest(
    tmp_path: Path, actions: list[Action]
) -> None:
    await play(Path(tempfile.mkdtemp(dir=tmp_path)), actions)
