"""How long a coordinator reads a journal before it leads: python benchmarks/replay.py [RUNS ROUNDS]

Repeats the rounds of a federated run that a cluster has journaled (3 clients, 8 facts per round),
and lets two coordinators take over one after the other, over SQLite and PostgreSQL. The first one
finds facts alone, as of runs that go on, and sums up what has ended; the second one finds that.
Seconds of CPU say more than seconds where others work.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from stratagem.common.base.ids import RunId  # noqa: E402
from stratagem.coordinator.app.plugins import BUILT_IN  # noqa: E402
from stratagem.coordinator.runtime.loop import Loop  # noqa: E402
from stratagem.coordinator.store.journal import Journal, Record  # noqa: E402
from stratagem.coordinator.store.lead import Holder  # noqa: E402
from tests.golden.replay import FOLDER, load  # noqa: E402
from tests.postgres import Postgres  # noqa: E402

BATCH = 2000
COUNTED = ("round_num", "segment", "step")


def rounds_of(run: list[Record], first: int, last: int) -> Iterator[Record]:
    """The run with its second round as all of these."""
    starts = [n for n, each in enumerate(run) if each.kind == "ClientsSelected"]
    yield from run[: starts[1]]
    for number in range(first, last + 1):
        for each in run[starts[1] : starts[2]]:
            payload = json.loads(each.payload)
            payload |= {key: payload[key] + number - 2 for key in COUNTED if key in payload}
            yield replace(each, payload=json.dumps(payload))
    yield from (each for each in run if each.kind in ("RunCompleted", "RunReleased"))


def long_run(run: list[Record], run_id: str, num_rounds: int) -> Iterator[Record]:
    for seq, each in enumerate(rounds_of(run, 2, num_rounds)):
        payload = each.payload
        if each.kind == "RunSubmitted":
            submitted = json.loads(payload)
            job = json.loads(submitted["job_json"])
            job["strategy"]["rounds"] = num_rounds
            payload = json.dumps(submitted | {"job_json": json.dumps(job)})
        yield replace(each, run_id=RunId(run_id), seq=seq, payload=payload, idem_key=None)


def measure(name: str, place: str, num_runs: int, num_rounds: int, folder: Path) -> None:
    golden = load(FOLDER / "0.1.0.sql", folder / f"{name}-golden.sqlite")
    workers = [each.record for each in golden.read(RunId(""))][:3]
    run = [each.record for each in golden.read(RunId("golden-fedavg"))]
    golden.close()
    journal = Journal.open(place)
    lead = journal.take_lead(Holder.of_this_process(), ttl_s=10)
    records = list(workers)
    for number in range(num_runs):
        records += long_run(run, f"run-{number}", num_rounds)
    for start in range(0, len(records), BATCH):
        journal.append(lead.term, records[start : start + BATCH])
    for what in ("facts", "summaries"):
        loop = Loop(journal, lead, BUILT_IN)
        before, cpu = time.perf_counter(), time.process_time()
        asyncio.run(loop.replay(lambda facts: None))
        wall_s, cpu_s = time.perf_counter() - before, time.process_time() - cpu
        assert len(loop.state.ended) == num_runs
        counts = f"{num_runs} | {len(records)}"
        print(f"| {name} | {what} | {counts} | {wall_s:.3f} | {cpu_s:.3f} |", flush=True)
    journal.close()


def main() -> None:
    num_runs, num_rounds = map(int, sys.argv[1:3] or ("10", "100"))
    print("| journal | reads | ended runs | facts | wall s | CPU s |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, Postgres() as server:
        place = str(Path(folder) / "journal.sqlite")
        measure("SQLite", place, num_runs, num_rounds, Path(folder))
        measure("PostgreSQL", server.new_schema(), num_runs, num_rounds, Path(folder))


if __name__ == "__main__":
    main()
