"""Journals with runs of very many facts, as long as they are wanted, and written in seconds.

Of journals that clusters have written, repeated: a run of segments, each with its commit, and one
of the rounds of a federation.
"""

import asyncio
import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.replay import long_run
from stratagem.common.base.ids import RunId
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core.fact_text import decode, encode
from stratagem.coordinator.core.facts import RunCancelled, RunReleased
from stratagem.coordinator.runtime.loop import Loop
from stratagem.coordinator.store import fact_log
from stratagem.coordinator.store.journal import Journal, Record, RunSummary
from stratagem.coordinator.store.lead import Holder
from tests.golden.replay import FOLDER, load

BATCH: Final = 2000
_GOLDEN: Final = {"segments": "golden-local", "rounds": "golden-fedavg"}


def fill(
    place: Path, num_facts: int, runs: Collection[str] = tuple(_GOLDEN), num_cancelled: int = 0
) -> None:
    """Write a journal with these runs of so many facts, and their summaries: a coordinator that
    replays so many takes a minute. num_cancelled: runs before them that never began."""
    with tempfile.TemporaryDirectory() as folder:
        golden = load(FOLDER / "0.2.0.sql", Path(folder) / "golden.sqlite")
        found = {
            run: [_now(each.record) for each in golden.read(RunId(_GOLDEN[run]))] for run in runs
        }
        golden.close()
        short = Journal.open(str(Path(folder) / "short.sqlite"))
        for run, records in found.items():
            _write(short, list(_MAKE[run](records, 24)))
        long = {run: list(_MAKE[run](records, num_facts)) for run, records in found.items()}
        counts = {RunId(run): len(records) for run, records in long.items()}
        with ThreadPoolExecutor(1) as thread:  # a loop may run in the present one
            summaries = thread.submit(lambda: asyncio.run(_summed_up(short, counts))).result()
        submitted = next(each for each in found[next(iter(found))] if each.kind == "RunSubmitted")
    place.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    journal = Journal.open(str(place))
    _write(journal, [each for n in range(num_cancelled) for each in _cancelled(submitted, n)])
    _write(journal, [record for records in long.values() for record in records], summaries)
    journal.close()


def _now(record: Record) -> Record:
    """The record as this version writes it."""
    fact = decode(record.kind, record.schema_version, record.payload)
    return replace(record, payload=encode(fact)[1])


def _segments(run: list[Record], num_facts: int) -> Iterator[Record]:
    """A run whose first segment is repeated, of so many facts or one less."""
    first = next(n for n, each in enumerate(run) if each.kind == "SegmentFinished")
    records = run[:first]
    pair = [(each, json.loads(each.payload)) for each in run[first : first + 2]]
    for number in range(1, (num_facts - first - 2) // 2 + 1):
        for each, payload in pair:
            payload |= {"segment": number, "step": 2 * number}
            payload["metrics"] |= {"test.loss": 1 / number}
            records.append(replace(each, payload=json.dumps(payload, separators=(",", ":"))))
    for seq, each in enumerate((*records, *run[-2:])):
        text = each.payload
        if each.kind == "RunSubmitted":
            submitted = json.loads(text)
            job = json.loads(submitted["job_json"]) | {"steps": len(records) - first}
            text = json.dumps(submitted | {"job_json": json.dumps(job)}, separators=(",", ":"))
        yield replace(each, run_id=RunId("segments"), seq=seq, payload=text, idem_key=None)


def _cancelled(submitted: Record, number: int) -> Iterator[Record]:
    """A run that was submitted and cancelled, each a minute before the one of the next number."""
    payload = json.loads(submitted.payload)
    wall_s = payload["wall_s"] - 60.0 * (number + 1)
    facts = {
        "RunSubmitted": json.dumps(payload | {"wall_s": wall_s}),
        "RunCancelled": encode(RunCancelled(reason="nobody wants it"))[1],
        "RunReleased": encode(RunReleased())[1],
    }
    for seq, (kind, text) in enumerate(facts.items()):
        known = replace(submitted, run_id=RunId(f"cancelled-{number:04}"), seq=seq, idem_key=None)
        yield replace(known, kind=kind, payload=text, wall_s=wall_s)


def _one_by_one(records: Iterable[Record]) -> Iterator[Record]:
    """Records that were repeated, each at a time of its own."""
    began_s = None
    for at, each in enumerate(records):
        began_s = each.wall_s if began_s is None else began_s
        yield replace(each, wall_s=began_s + 0.02 * at)


def _rounds(run: list[Record], num_facts: int) -> Iterator[Record]:
    """A federation whose second round is repeated, of so many facts or a few more."""
    return long_run(run, "rounds", num_facts // 8)


_MAKE: Final[Mapping[str, Callable[[list[Record], int], Iterator[Record]]]] = {
    "segments": lambda run, num: _one_by_one(_segments(run, num)),
    "rounds": lambda run, num: _one_by_one(_rounds(run, num)),
}


def _write(
    journal: Journal, records: Sequence[Record], summaries: Sequence[RunSummary] = ()
) -> None:
    lead = journal.take_lead(Holder.of_this_process(), ttl_s=10)
    for start in range(0, len(records), BATCH):
        journal.append(lead.term, records[start : start + BATCH])
    journal.append(lead.term, [], summaries)
    journal.release(lead.term)


async def _summed_up(journal: Journal, counts: Mapping[RunId, int]) -> list[RunSummary]:
    """The summaries of the runs of a journal, as if each had so many facts."""
    loop = Loop(journal, journal.take_lead(Holder.of_this_process(), ttl_s=10), BUILT_IN)
    await loop.replay(lambda _: None)
    views = await loop.recorded.views(loop.state.ended)
    found = []
    for run_id, run in loop.state.ended.items():
        shown = views[run_id].model_copy(update={"num_facts": counts[run_id]})
        found.append(fact_log.summary(replace(run, num_facts=counts[run_id]), shown))
    await loop.close()
    return found
