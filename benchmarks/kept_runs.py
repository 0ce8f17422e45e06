"""Measure what ended runs that are kept cost the event loop: python benchmarks/kept_runs.py [RUNS]

Writes a journal with so many cancelled runs and their summaries, and lets a coordinator lead, whose
tasks are then done one by one. Of each, the longest callback of the event loop is printed, by the
seconds of a processor that its thread had: everything else waits for so long.
"""

import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cluster_facts import Callbacks  # noqa: E402
from stratagem.common.base.ids import Digest, RunId  # noqa: E402
from stratagem.coordinator.app.app import App  # noqa: E402
from stratagem.coordinator.core.commands import (  # noqa: E402
    CancelRun,
    JournalEntry,
    Report,
    SubmitRun,
)
from stratagem.coordinator.core.facts import (  # noqa: E402
    Fact,
    RunCancelled,
    RunReleased,
    RunSubmitted,
)
from stratagem.coordinator.core.retention import has_brought, is_shared  # noqa: E402
from stratagem.coordinator.core.run_view import at_rest  # noqa: E402
from stratagem.coordinator.process.metrics import CoordinatorMonitor  # noqa: E402
from stratagem.coordinator.service.queries import Runs  # noqa: E402
from stratagem.coordinator.store import fact_log  # noqa: E402
from stratagem.coordinator.store.fact_log import Committed  # noqa: E402
from stratagem.coordinator.store.journal import Journal  # noqa: E402
from stratagem.coordinator.store.lead import Holder  # noqa: E402
from tests.coordinator.core.jobs import LOCAL, job_text  # noqa: E402
from tests.coordinator.core.simulation import Simulation  # noqa: E402
from tests.coordinator.open_gate import entrance  # noqa: E402
from tests.settings import coordinator_settings  # noqa: E402

BATCH = 1000
LOGS_OF = 100_000
"""Runs with a log, at most."""


def digest_of(number: int) -> Digest:
    return Digest(f"{number:064x}")


def fill(place: Path, num_runs: int) -> None:
    """Write a journal of runs at rest: what each of them needs is its own, but for the data."""
    simulation, run_id = Simulation(), RunId("template")
    data = digest_of(2**100)
    submitted = RunSubmitted(job_json=job_text(LOCAL, data={"inline": data}), wall_s=1.0)
    facts: tuple[Fact, ...] = (
        submitted,
        RunCancelled(reason="nobody wants it"),
        RunReleased(),
    )
    simulation.tell(SubmitRun(run_id, submitted.job_json, 1.0, owner="alice"))
    simulation.tell(CancelRun(run_id))
    simulation.tell(Report(run_id, RunReleased()))
    found = at_rest(simulation.agenda.world, simulation.state.runs[run_id], 1.0)
    assert found is not None
    run, view = found
    journal = Journal.open(place)
    term = journal.take_lead(Holder.of_this_process(), ttl_s=10).term
    for start in range(0, num_runs, BATCH):
        records, summaries = [], []
        for number in range(start, min(start + BATCH, num_runs)):
            name, at_s = RunId(f"run-{number:06}"), float(number)
            for index, fact in enumerate(facts):
                entry = JournalEntry(name, fact)
                records.append(fact_log.record(Committed(entry, index, at_s, at_s)))
            own = (digest_of(2 * number), digest_of(2 * number + 1))
            kept = replace(
                run, run_id=name, blobs=(*own, data), submitted_wall_s=at_s, ended_s=at_s,
                num_facts=3,
            )  # fmt: skip
            shown = view.model_copy(update={"run_id": name, "submitted_at_s": at_s})
            summaries.append(fact_log.summary(kept, shown))
        journal.append(term, records, summaries)
    journal.release(term)
    journal.close()


async def timed(what: str, task: Callable[[], Awaitable[object]]) -> None:
    with Callbacks() as callbacks:
        began_s = time.perf_counter()
        await asyncio.create_task(task())  # type: ignore[arg-type]
        whole_ms = 1000 * (time.perf_counter() - began_s)
    print(f"| {what} | {callbacks.cpu_ms:.1f} | {whole_ms:.0f} |", flush=True)


async def tasks(app: App) -> None:
    job, runs = job_text(LOCAL), Runs(app)
    monitor = CoordinatorMonitor(app.settings)
    monitor.app = app

    async def run_ends() -> None:
        await app.loop.submit(CancelRun(RunId("new")))
        assert RunId("new") in app.loop.state.ended

    async def watch() -> None:
        await anext(runs.watch())

    async def last_page() -> None:
        token = ""
        for _ in range(2):
            token = (await runs.page(token)).next_page_token

    async def sample() -> None:
        await asyncio.to_thread(lambda: list(monitor.sample()()))

    async def back_up() -> None:
        async with app.backups.snapshot("somebody"):
            pass

    async def names() -> None:
        has_brought(app.loop.state, "bob", digest_of(7))
        is_shared(app.loop.state, digest_of(7))

    await app.loop.submit(SubmitRun(RunId("new"), job, time.time()))
    await timed("a run ends", run_ends)
    await timed("blobs are collected", app.collector.collect)
    await timed("runs that have expired are looked for", app._house.expire_runs)
    await timed("logs that have expired are looked for", app._house.delete_logs)
    await timed("workers that were lost are looked for", app._house.forget_workers)
    await timed("step histories are merged", app._house.merge_histories)
    await timed("pages of the list of runs", last_page)
    await timed("all runs begin to be watched", watch)
    await timed("metrics are read", sample)
    await timed("a backup is begun", back_up)
    await timed("a job names a blob", names)


async def measure(folder: Path, num_runs: int) -> None:
    settings = coordinator_settings(
        data_dir=folder, keep_runs=num_runs + 1, keep_runs_for=1e9, keep_logs_for=1e9
    )
    began_s, cpu_s = time.perf_counter(), time.process_time()
    app = await App.lead(settings, entrance())
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    print(f"{len(app.loop.state.ended)} kept runs; lead in {wall_s:.1f} s, {cpu_s:.1f} s of CPU\n")
    print("| task | longest callback, ms of CPU | whole, ms |\n|---|---|---|")
    serving = asyncio.create_task(app.loop.run(app._changed))
    await tasks(app)
    serving.cancel()
    closing: list[Any] = [app.supervisor.close(), app._chores.close(), app.kept.close()]
    await asyncio.gather(serving, *closing, return_exceptions=True)
    app.logs.close()
    await app.loop.close()


def main() -> None:
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        fill(folder / "journal.sqlite", num_runs)
        (folder / "logs").mkdir()
        for number in range(min(num_runs, LOGS_OF)):
            (folder / "logs" / f"run-{number:06}.jsonl").touch()
        asyncio.run(measure(folder, num_runs))


if __name__ == "__main__":
    main()
