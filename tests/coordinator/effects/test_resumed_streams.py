"""Marks of streams that a run takes over from the commit of another one that it resumes."""

import json
from typing import Any

import pytest

from stratagem.common.base.ids import Digest
from stratagem.common.job import JobSpec, with_fields
from stratagem.coordinator.effects.build import streams_of
from tests.coordinator.core.jobs import DATA_PARALLEL, job_text
from tests.coordinator.core.simulation import RUN, start

pytestmark = pytest.mark.core

OTHERS: dict[str, Any] = {
    "data.streams": 6,
    "data.kwargs": {"folder": "elsewhere"},
    "seed": 8,
    "strategy.num_replicas": 1,
}


def test_marks_are_taken_over_by_a_job_that_reads_the_same_rows_alone() -> None:
    text = job_text(DATA_PARALLEL)
    simulation = start(text, "a", "b", "c")
    simulation.run()
    run = simulation.state.runs[RUN]
    commit, first = run.commits[-1], JobSpec.parse(json.loads(text))
    assert commit.streams
    longer: dict[str, Any] = {"epochs": None, "steps": 50}
    assert streams_of([run], with_fields(first, longer), commit.digest) == commit.streams
    assert streams_of([run], first, Digest(64 * "0")) == ""
    for name, value in OTHERS.items():
        other = with_fields(first, {**longer, name: value})
        assert streams_of([run], other, commit.digest) == "", name
    again = start(json.dumps(with_fields(first, {"seed": 9}).document()), "a", "b", "c")
    again.run()
    assert streams_of([again.state.runs[RUN], run], first, commit.digest) == commit.streams
