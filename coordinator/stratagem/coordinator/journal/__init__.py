"""The durable event log of the coordinator, and the lease that says who may write it.

    journal.py   the log: take the lead, append, replay
    holder.py    who holds the lease, and whether that process still lives
    tables.py    the schema

Knows events as rows of text. What they mean is `core/facts.py`.
"""

from stratagem.coordinator.journal.holder import Holder
from stratagem.coordinator.journal.journal import (
    DuplicateKeyError,
    FencedError,
    Journal,
    Lead,
    Record,
    StoredRecord,
)

__all__ = [
    "DuplicateKeyError",
    "FencedError",
    "Holder",
    "Journal",
    "Lead",
    "Record",
    "StoredRecord",
]
