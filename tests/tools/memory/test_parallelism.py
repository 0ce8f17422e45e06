"""Parallelism as a strategy, and settings that fit."""

import itertools
from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.strategy import (
    DataParallel,
    Direct,
    Local,
    ModelParallel,
    Pipeline,
    WorkerIdTarget,
)
from stratagem.tools.memory.recommend import CandidateWorker, Fleet, balanced, recommend, resolve
from tests.tools.memory.support import SITE, estimate, kind_job

GB = 10**9
SHALLOW = {"depth": 1}
SMALL = {"depth": 1, "width": 8}


def fleet(number: int, *, memory_bytes: int = 64 * GB) -> Fleet:
    workers = (
        CandidateWorker(f"worker-{n}", f"host-{n}", "cpu", memory_bytes, 4) for n in range(number)
    )
    return Fleet(tuple(workers))


def resolved(parallelism: Any, workers: Fleet, kind: str = "mlp", **changes: Any) -> Any:
    spec = kind_job(kind, execution={"parallelism": parallelism}, **changes)
    return resolve(spec, SITE, workers)


def names_of(strategy: ModelParallel) -> list[str]:
    targets = [part.target for part in strategy.partitions]
    return [target.worker_id for target in targets if isinstance(target, WorkerIdTarget)]


def heaviest(weights: list[int], cuts: list[range]) -> int:
    return max(sum(weights[cut.start : cut.stop]) for cut in cuts)


@pytest.mark.parametrize("weights", [[1], [5, 1, 1, 1], [0, 0, 3, 0], [3, 1, 4, 1, 5, 9, 2]])
def test_balanced_cuts_are_as_good_as_any(weights: list[int]) -> None:
    for number in range(1, len(weights) + 1):
        found = balanced(weights, number)
        assert [i for cut in found for i in cut] == list(range(len(weights)))
        assert len(found) == number
        assert all(found)
        every = (
            [range(a, b) for a, b in itertools.pairwise((0, *cuts, len(weights)))]
            for cuts in itertools.combinations(range(1, len(weights)), number - 1)
        )
        assert heaviest(weights, found) == min(heaviest(weights, cuts) for cuts in every)
    with pytest.raises(ValueError, match="cannot make"):
        balanced(weights, len(weights) + 1)


def test_data_parallel_is_a_strategy_with_as_many_replicas() -> None:
    spec, reason = resolved({"DataParallel": 3}, fleet(2))
    assert isinstance(spec.strategy, DataParallel)
    assert spec.strategy.num_replicas == 3
    assert spec.execution.parallelism == "None"
    assert reason == "DataParallel over 3 workers, as asked for"
    assert JobSpec.from_json(spec.canonical_json()) == spec


def test_a_model_in_a_row_is_cut_into_balanced_parts() -> None:
    spec, reason = resolved({"PipelineParallel": 2}, fleet(2))
    assert isinstance(spec.strategy, ModelParallel)
    assert spec.strategy.communication == Pipeline(2)  # 16 rows, 2 stages of 4 micro-batches each
    parts = [part.node_ids for part in spec.strategy.partitions]
    assert [node for part in parts for node in part] == [str(n) for n in range(5)]
    assert "balanced by operations" in reason
    spec, _ = resolved({"ModelParallel": 2}, fleet(2))
    assert isinstance(spec.strategy, ModelParallel)
    assert spec.strategy.communication == Direct()
    assert names_of(spec.strategy) == ["worker-0", "worker-1"]


@pytest.mark.parametrize(
    ("parallelism", "workers", "kind", "message"),
    [
        ({"PipelineParallel": 2}, 2, "rnn", "cannot cut this model"),
        ({"PipelineParallel": 3}, 2, "mlp", "needs as many workers; there are 2"),
        ({"ModelParallel": 12}, 12, "mlp", "has only 5 nodes"),
        ("Automatic", 0, "mlp", "no worker"),
    ],
)
def test_what_cannot_be_cut_is_told(
    parallelism: Any, workers: int, kind: str, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        resolved(parallelism, fleet(workers), kind)


def test_automatic_weighs_computing_against_exchanging() -> None:
    spec, reason = resolved("Automatic", fleet(1))
    assert (spec.strategy, reason) == (Local(), "Local: there is one worker")
    spec, reason = resolved("Automatic", fleet(4), kwargs=SHALLOW)
    assert spec.strategy == Local()
    assert "exchanging costs more than 4 workers save" in reason
    wide: dict[str, Any] = {
        "kwargs": {"width": 512, **SHALLOW},
        "data": {"width": 512},
        "batch_size": 16384,
    }
    spec, reason = resolved("Automatic", fleet(4), **wide)
    assert isinstance(spec.strategy, DataParallel)
    assert spec.strategy.num_replicas == 4
    assert reason.startswith("DataParallel over 4 of 4 workers:")


@pytest.mark.sweep
def test_automatic_makes_a_pipeline_of_what_fits_no_worker() -> None:
    whole = estimate(kind_job("mlp", kwargs={"depth": 2}, batch_size=4)).needed
    workers = fleet(4, memory_bytes=whole * 4 // 5)
    spec, reason = resolved("Automatic", workers, kwargs={"depth": 2}, batch_size=4)
    assert isinstance(spec.strategy, ModelParallel)
    assert reason.startswith("PipelineParallel over 2 workers")
    with pytest.raises(InvalidInputError, match="and a pipeline over all workers needs"):
        resolved("Automatic", fleet(2, memory_bytes=1000), kwargs=SHALLOW, batch_size=4)
    with pytest.raises(InvalidInputError, match="no pipeline can be made"):
        resolved("Automatic", fleet(2, memory_bytes=1000), "rnn", batch_size=4)


@pytest.mark.sweep
def test_what_fits_is_left_as_it_is_and_what_fits_nowhere_is_told() -> None:
    spec = kind_job("mlp", kwargs=SHALLOW, batch_size=256)
    found = recommend(spec, SITE, GB)
    assert found.fits
    assert found.job == spec
    assert (found.micro_batch, found.accumulation_steps) == (256, 1)
    assert found.reasons[0] == "The strategy is Local."
    spec = kind_job("mlp", kwargs=SMALL, data={"width": 8}, batch_size=2)
    found = recommend(spec, SITE, 1000, 2)
    assert not found.fits
    assert "Nothing that the workers carry out fits" in found.reasons[-1]


def test_what_does_not_fit_at_once_is_accumulated() -> None:
    spec = kind_job("mlp", kwargs=SHALLOW, batch_size=256)
    enough = estimate(kind_job("mlp", kwargs=SHALLOW, batch_size=120)).needed
    memory = enough * 10 // 9 + 1
    found = recommend(spec, SITE, memory)
    assert found.fits
    assert found.accumulation_steps == 3  # ceil(256 / 120)
    assert found.job.execution.accumulation_steps == 3
    assert found.micro_batch == 86
    assert any("so each share takes 3 micro-batches" in reason for reason in found.reasons)


def test_a_parallelism_that_is_asked_for_stays() -> None:
    parallelism = {"parallelism": {"DataParallel": 3}}
    spec = kind_job("mlp", kwargs=SMALL, data={"width": 8}, execution=parallelism)
    found = recommend(spec, SITE, GB, 2)
    assert isinstance(found.job.strategy, DataParallel)
    assert found.job.strategy.num_replicas == 3
    assert found.reasons[0] == "DataParallel over 3 workers, as asked for."
    with pytest.raises(InvalidInputError, match=r"execution\.parallelism"):
        estimate(spec)  # not resolved


def test_precision_is_lowered_last_and_said() -> None:
    spec = kind_job("mlp", kwargs=SHALLOW, batch_size=1, execution={"precision": "Full"})
    enough = estimate(kind_job("mlp", kwargs=SHALLOW, batch_size=1)).needed
    found = recommend(spec, SITE, enough * 10 // 8)
    assert found.fits
    assert found.job.execution.precision == "Single"
    assert any("lowered from Full to Single" in reason for reason in found.reasons)


def test_a_recommended_pipeline_has_the_names_of_workers_that_are_there() -> None:
    spec = kind_job("mlp", kwargs=SHALLOW, execution={"parallelism": {"ModelParallel": 2}})
    members = [
        CandidateWorker(name, "one-host", memory_bytes=2 * GB) for name in ("alice", "bob", "carol")
    ]
    found = recommend(spec, SITE, None, members=members)
    assert isinstance(found.job.strategy, ModelParallel)
    targets = names_of(found.job.strategy)
    assert targets == ["alice", "bob"]
    assert "stand for your workers" not in found.reasons[0]
    assert "572.2 MiB that may be used" in found.reasons[-1]  # nine tenths of a third of 2 GB
    told = recommend(spec, SITE, GB, 2)
    assert "worker-0, worker-1 and so on stand for your workers" in told.reasons[0]


def test_who_is_there_is_known_or_asked_for() -> None:
    spec, member = kind_job("mlp", kwargs=SHALLOW), CandidateWorker("alice", "here")
    for memory_bytes, num_workers, members, said in (
        *((0, 1, None, "memory: 0"), (-5, 1, None, "memory: -5"), (GB, 0, None, "workers: 0")),
        (None, None, None, "memory: missing"),
        (None, None, [member], "memory: the workers do not say"),
        (GB, 2, [member], "workers: 2 asked for, and the coordinator has 1"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            recommend(spec, SITE, memory_bytes, num_workers, members=members)
    assert recommend(spec, SITE, GB, members=[member]).fits
