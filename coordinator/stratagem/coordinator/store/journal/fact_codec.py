"""Converts facts and summaries to rows of the journal, and back."""

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

from pydantic import TypeAdapter

from stratagem.coordinator.core.commands import JournalEntry
from stratagem.coordinator.core.facts.fact_serialization import (
    SCHEMA_VERSION,
    decode,
    encode,
    payload_now,
)
from stratagem.coordinator.core.state import EndedRun
from stratagem.coordinator.core.state_machine.run_view import RunView
from stratagem.coordinator.store.journal.journal import Record
from stratagem.coordinator.store.journal.summaries import RunSummary

_brief: Final = TypeAdapter(EndedRun)


def _version() -> str:
    """Return the version of the program and of the form of summaries: that changes between
    versions, too."""
    shapes = json.dumps([_brief.json_schema(), RunView.model_json_schema()], sort_keys=True)
    return f"{version('stratagem')[:40]} {hashlib.sha256(shapes.encode()).hexdigest()[:16]}"


VERSION: Final = _version()
"""Version of the summaries that are read; all others are made again."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A durable fact: its number inside its run, and its time."""

    entry: JournalEntry
    index: int
    time_s: float
    wall_s: float
    payload: str = ""
    """The fact as JSON, where it was read; empty where it was not."""
    shown_index: int = -1
    """Its number among the facts of its run that readers get; -1: they do not get it, or nobody
    has counted."""


def committed(record: Record) -> Committed:
    """Return the fact in a row."""
    fact = decode(record.kind, record.schema_version, record.payload)
    return Committed(JournalEntry(record.run_id, fact), record.seq, record.time_s, record.wall_s)


def shown_fact(record: Record) -> Committed:
    """Return the fact in a row, with its payload for those who watch."""
    fact = decode(record.kind, record.schema_version, record.payload)
    payload, entry = (
        payload_now(record.kind, fact, record.payload),
        JournalEntry(record.run_id, fact),
    )
    return Committed(entry, record.seq, record.time_s, record.wall_s, payload)


def record(item: Committed) -> Record:
    """Return the row of a fact."""
    kind, payload = encode(item.entry.fact)
    return Record(
        run_id=item.entry.run_id,
        seq=item.index,
        kind=kind,
        schema_version=SCHEMA_VERSION,
        payload=payload,
        time_s=item.time_s,
        wall_s=item.wall_s,
        idem_key=item.entry.key,
    )


def summary(run: EndedRun, run_view: RunView) -> RunSummary:
    """Return the row of a run at rest."""
    brief = _brief.dump_json(run).decode()
    return RunSummary(run.run_id, VERSION, brief, run_view.model_dump_json())


def ended_run(brief: str) -> EndedRun:
    """Return the part of a summary that stays in memory of a run at rest."""
    return _brief.validate_json(brief)


def view_of(text: str) -> RunView:
    """Return the part of a summary that is shown of a run at rest."""
    return RunView.model_validate_json(text)
