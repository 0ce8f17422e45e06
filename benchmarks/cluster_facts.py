"""Measure what facts of the cluster cost: python benchmarks/cluster_facts.py [FACTS WORKERS]

Writes a journal in which so many workers are lost and start anew, again and again, and lets two
coordinators take over one after the other: the first one reads every fact, as after an upgrade from
a version that summed up none. Then one leads while workers go on so, and what blocks its event loop
is measured. Last, one registration is folded among 100, 1,000 and 10,000 workers. Seconds of CPU
say more than seconds where others work.
"""

import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from stratagem.common.base.ids import Incarnation, WorkerId  # noqa: E402
from stratagem.coordinator.app.plugins import BUILT_IN  # noqa: E402
from stratagem.coordinator.core.apply import CLUSTER, apply  # noqa: E402
from stratagem.coordinator.core.commands import LoseWorker, RegisterWorker  # noqa: E402
from stratagem.coordinator.core.decide import Agenda  # noqa: E402
from stratagem.coordinator.core.fact_text import SCHEMA_VERSION, encode  # noqa: E402
from stratagem.coordinator.core.facts import (  # noqa: E402
    Capability,
    Fact,
    Member,
    WorkerLost,
    WorkerRegistered,
)
from stratagem.coordinator.core.state import CoordinatorState  # noqa: E402
from stratagem.coordinator.runtime.loop import Loop  # noqa: E402
from stratagem.coordinator.store.journal import Journal, Record  # noqa: E402
from stratagem.coordinator.store.lead import Holder  # noqa: E402

BATCH = 2000
LED_FACTS = 40_000
CAPABILITY = Capability(
    device="cuda:0",
    device_name="NVIDIA H200",
    memory_bytes=149 * 2**30,
    num_threads=16,
    numerics_fingerprint="0123456789abcdef" * 2,
    numerics_description="torch 2.13.0, CUDA 13.0, NVIDIA H200, float32 without TF32",
    tags=("gpu", "site-a"),
    data_plane="tls",
    numerics_rules=3,
)


def member(number: int, start: int) -> Member:
    name = f"worker-{number:05}"
    return Member(worker_id=WorkerId(name), incarnation=Incarnation(f"{name}-{start:08x}"))


def address(number: int) -> str:
    return f"10.0.{number // 250}.{number % 250}:7071"


def facts(num_facts: int, num_workers: int) -> Iterator[Fact]:
    """Yield what happens to workers that start anew, one after the other."""
    for at in range(num_facts):
        turn, number = divmod(at // 2, num_workers)
        of = member(number, turn)
        if at % 2:
            yield WorkerLost(member=of, reason="silent for 15 s")
        else:
            yield WorkerRegistered(member=of, address=address(number), capability=CAPABILITY)


def write(journal: Journal, term: int, num_facts: int, num_workers: int) -> None:
    batch: list[Record] = []
    for seq, fact in enumerate(facts(num_facts, num_workers)):
        kind, payload = encode(fact)
        batch.append(Record(CLUSTER, seq, kind, SCHEMA_VERSION, payload, 1.0 * seq, 1.0 * seq))
        if len(batch) == BATCH:
            journal.append(term, batch)
            batch = []
    journal.append(term, batch)


def take_over(place: Path, what: str) -> None:
    journal = Journal.open(place)
    lead = journal.take_lead(Holder.of_this_process(), ttl_s=10)
    loop = Loop(journal, lead, BUILT_IN)
    num_rows = sum(1 for _ in journal.read(CLUSTER))
    began_s, cpu_s = time.perf_counter(), time.process_time()
    asyncio.run(loop.replay(lambda _: None))
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    num_workers = len(loop.state.workers)
    size_mb = place.stat().st_size / 2**20
    print(
        f"| {what} | {num_rows} | {num_workers} | {wall_s:.2f} | {cpu_s:.2f} | {size_mb:.0f} |",
        flush=True,
    )
    journal.release(lead.term)
    journal.close()


class Callbacks:
    """The longest callback of the event loop, by the clock and by the processor that it had."""

    def __init__(self) -> None:
        self.wall_ms = self.cpu_ms = 0.0
        self._handles: Any = asyncio.Handle
        self._run = self._handles._run

    def __enter__(self) -> "Callbacks":
        def watched(handle: Any) -> None:
            began_s, cpu_s = time.perf_counter(), time.thread_time()
            self._run(handle)
            self.wall_ms = max(self.wall_ms, 1000 * (time.perf_counter() - began_s))
            self.cpu_ms = max(self.cpu_ms, 1000 * (time.thread_time() - cpu_s))

        self._handles._run = watched
        return self

    def __exit__(self, *_: object) -> None:
        self._handles._run = self._run


async def led(place: Path, num_workers: int) -> None:
    """Lead while workers come and go, and print what that blocks."""
    journal = Journal.open(place)
    loop = Loop(journal, journal.take_lead(Holder.of_this_process(), ttl_s=10), BUILT_IN)
    await loop.replay(lambda _: None)
    summing: list[asyncio.Task[None]] = []

    def on_change(_: object) -> None:
        if (
            hasattr(loop, "sum_up_cluster")
            and loop.cluster_is_long
            and all(each.done() for each in summing)
        ):
            summing.append(asyncio.create_task(loop.sum_up_cluster()))

    serving = asyncio.create_task(loop.run(on_change))
    longest_s, began_s = 0.0, time.perf_counter()
    with Callbacks() as callbacks:
        for at in range(LED_FACTS // 64):
            asked_s = time.perf_counter()
            commands: list[RegisterWorker | LoseWorker] = []
            for each in range(32):
                turn, number = divmod(32 * at + each, num_workers)
                of = member(number, 1_000_000 + turn)
                commands.append(RegisterWorker(of, address(number), CAPABILITY))
                commands.append(LoseWorker(of, "silent for 15 s"))
            await asyncio.gather(*map(loop.submit, commands))
            longest_s = max(longest_s, time.perf_counter() - asked_s)
    took_s = time.perf_counter() - began_s
    await asyncio.gather(*summing)
    num_rows = sum(1 for _ in journal.read(CLUSTER))
    print(
        f"\n{num_workers} workers, {LED_FACTS} facts, 64 in a transaction, in {took_s:.1f} s, "
        f"summed up {len(summing)} times, {num_rows} rows left; longest callback of the event loop "
        f"{callbacks.wall_ms:.1f} ms ({callbacks.cpu_ms:.1f} ms of CPU); longest transaction "
        f"{1000 * longest_s:.0f} ms",
        flush=True,
    )
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await loop.close()


def fold(num_workers: int) -> None:
    """Print what a registration costs the fold, and the fold with the agenda of the loop."""
    state = CoordinatorState(BUILT_IN)
    for number in range(num_workers):
        registered = WorkerRegistered(
            member=member(number, 0), address=address(number), capability=CAPABILITY
        )
        state = apply(state, CLUSTER, registered, 0.0)
    agenda, took_s, noted_s = Agenda(state), [], []
    for number in range(1000):
        at = number * 7919 % num_workers
        registered = WorkerRegistered(
            member=member(at, 1 + number), address=address(at), capability=CAPABILITY
        )
        began_s = time.perf_counter()
        state = apply(state, CLUSTER, registered, 0.0)
        folded_s = time.perf_counter()
        agenda.note(state, CLUSTER)
        took_s.append(folded_s - began_s)
        noted_s.append(time.perf_counter() - folded_s)
    middle, noted = sorted(took_s)[500], sorted(noted_s)[500]
    print(f"| {num_workers} | {1e6 * middle:.1f} | {1e6 * noted:.1f} |", flush=True)


def main() -> None:
    num_facts, num_workers = map(int, sys.argv[1:3] or ("100000", "1000"))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "journal.sqlite"
        journal = Journal.open(place)
        lead = journal.take_lead(Holder.of_this_process(), ttl_s=10)
        write(journal, lead.term, num_facts, num_workers)
        journal.release(lead.term)
        journal.close()
        print(
            "| takeover | rows | workers | wall s | CPU s | file MiB |\n|---|---|---|---|---|---|"
        )
        take_over(place, "the first")
        take_over(place, "the second")
        asyncio.run(led(place, num_workers))
        print("\n| workers | fold µs | agenda µs |\n|---|---|---|")
        for number in (100, 1000, 10_000):
            fold(number)


if __name__ == "__main__":
    main()
