"""The summary of the cluster's state, as facts that replace those that led to it.

A takeover folds the facts of the cluster from the first one on. Workers that restart for years
write millions of facts, of which the state keeps one record per worker. The summary has several
parts, so that each row of the journal, and each step of writing it, stays small.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import islice, zip_longest
from typing import Final, TypeVar

from stratagem.coordinator.core.facts import ClusterSummed, KnownWorker
from stratagem.coordinator.core.state import CoordinatorState, WorkerRecord

T = TypeVar("T")

WORKERS_EACH: Final = 256
"""Workers in a part."""
PINS_EACH: Final = 4096
OWNERS_EACH: Final = 16
"""Owners in a part, each with a few hundred uploads."""

_FIELDS: Final = tuple(each.name for each in fields(WorkerRecord))


def summary_of(state: CoordinatorState) -> list[ClusterSummed]:
    """Return the parts of the summary: at least one, and no more than there were facts."""
    workers = _batches(map(_known, state.workers.values()), WORKERS_EACH)
    pinned = _batches(sorted(state.pinned), PINS_EACH)
    uploads = map(dict, _batches(state.uploads.items(), OWNERS_EACH))
    parts = zip_longest([dict(state.holds)], workers, pinned, uploads)
    return [
        ClusterSummed(holds=held or {}, workers=known or (), pinned=pins or (), uploads=owned or {})
        for held, known, pins, owned in parts
    ]


def with_summary(state: CoordinatorState, part: ClusterSummed) -> CoordinatorState:
    """Return the state with a part of a summary folded in."""
    workers, uploads = state.workers, state.uploads
    for known in part.workers:
        record = WorkerRecord(**{name: getattr(known, name) for name in _FIELDS})
        workers = workers.with_item(record.member.worker_id, record)
    for owner, digests in part.uploads.items():
        uploads = uploads.with_item(owner, digests)
    return replace(
        state,
        workers=workers,
        uploads=uploads,
        pinned=state.pinned | frozenset(part.pinned),
        holds={**state.holds, **part.holds},
    )


def _known(record: WorkerRecord) -> KnownWorker:
    return KnownWorker(**{name: getattr(record, name) for name in _FIELDS})


def _batches(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """Yield the items in batches."""
    left = iter(items)
    while batch := tuple(islice(left, size)):
        yield batch
