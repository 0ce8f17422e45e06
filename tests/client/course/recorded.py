"""Events of runs for the tests of what is shown: of golden journals, and of simulated runs."""

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from functools import cache
from typing import Any

from stratagem.client.course.views import Event, Phase
from stratagem.coordinator.core.fact_text import decode, sentence
from tests.coordinator.core.simulation import RUN, Simulation
from tests.golden.replay import FOLDER

Row = tuple[str, str, float]
"""Kind, payload as JSON, and time."""


@cache
def golden(run_id: str, version: str = "0.2.0") -> tuple[Event, ...]:
    """The events of a run that a real cluster of an earlier version has journaled."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript((FOLDER / f"{version}.sql").read_text())
        query = "SELECT kind, payload, wall_s FROM event WHERE run_id = ? ORDER BY seq"
        found = as_events(connection.execute(query, (run_id,)))
    assert found, f"there is no run {run_id}"
    return found


def job_of(events: Iterable[Event]) -> dict[str, Any]:
    """The job of a run, as its first event has it."""
    job: dict[str, Any] = json.loads(next(iter(events)).payload["job_json"])
    return job


def simulated(simulation: Simulation) -> tuple[Event, ...]:
    """The events of the run of a simulation."""
    return as_events((k, p, time_s) for run, k, p, time_s in simulation.journal if run == RUN)


def as_events(rows: Iterable[Row]) -> tuple[Event, ...]:
    """The events as a client gets them, in the form of today."""
    events = []
    for index, (kind, payload, time_s) in enumerate(rows):
        fact = decode(kind, 1, payload)
        values = json.loads(fact.model_dump_json())
        events.append(Event(index, time_s, kind, sentence(fact), values, Phase.RUNNING))
    return tuple(events)
