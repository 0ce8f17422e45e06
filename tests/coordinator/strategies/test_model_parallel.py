"""Placement of partitions and of replicas of pipelines, in the pure core; and runs that train
nothing, whose only work is an evaluation."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core.commands import CancelRun, ResumeRun
from stratagem.coordinator.core.effects import CommitSegment, EvaluateState, RunSegment
from stratagem.coordinator.core.facts import MembersFormed, SegmentCommitted, SegmentFinished
from stratagem.coordinator.core.pending import live_blobs
from stratagem.coordinator.core.retention import is_shared
from stratagem.coordinator.core.strategy_calls import objections_to
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.strategies.schedule import SegmentSchedule
from tests.coordinator.core.jobs import DATA_PARALLEL, evaluation_only, job_text
from tests.coordinator.core.simulation import (
    RUN,
    Simulation,
    digest,
    do,
    ending,
    member,
    register,
    start,
)

pytestmark = pytest.mark.core


GPU, CPU = {"Tag": "gpu"}, {"Tag": "cpu"}
ON_GPU, ON_CPU = ("gpu",), ("cpu",)
FOUR = {"a": ON_GPU, "b": ON_CPU, "c": ON_CPU, "d": ON_GPU}


def model_parallel(*targets: dict[str, str], **options: Any) -> dict[str, Any]:
    """One node per partition: a, b, c."""
    nodes = zip("abc", targets, strict=False)
    return {
        "type": "ModelParallel",
        "partitions": [{"node_ids": [node], "target": target} for node, target in nodes],
        "communication": {"protocol": "Pipeline", "micro_batch_size": 3},
        "options": options,
    }


def replicated(num_replicas: int, inner: dict[str, Any], **options: Any) -> dict[str, Any]:
    options = {"inner": inner, **options}
    return {**DATA_PARALLEL, "num_replicas": num_replicas, "options": options}


def begun(text: str | dict[str, Any], **workers: tuple[str, ...]) -> Simulation:
    """Workers by name with their tags, in order of registration."""
    simulation = start(text if isinstance(text, str) else job_text(text))
    for name, tags in workers.items():
        simulation.come([name], tags=tags)
    return simulation


def placed(simulation: Simulation) -> tuple[list[str], tuple[int, ...]]:
    formed = simulation.facts(MembersFormed)[-1]
    return [m.worker_id for m in formed.members], formed.ranks


@pytest.mark.parametrize(
    ("targets", "workers", "expected"),
    [
        ([GPU, CPU], {"x": ON_CPU, "y": ON_GPU}, (["y", "x"], (0, 1))),
        ([GPU, GPU], {"x": ON_GPU, "y": ON_GPU}, (["x", "y"], (0, 1))),
        ([GPU, GPU, GPU], {"x": ON_GPU, "y": ON_GPU}, (["x", "y"], (0, 1, 0))),
        ([GPU, {"WorkerId": "x"}, GPU], {"x": (), "y": ON_GPU}, (["y", "x"], (0, 1, 0))),
        ([GPU, GPU], {"x": ON_GPU}, (["x"], (0, 0))),
    ],
)
def test_partitions_go_to_the_first_registered_worker_that_fits(
    targets: list[dict[str, str]],
    workers: dict[str, tuple[str, ...]],
    expected: tuple[list[str], tuple[int, ...]],
) -> None:
    assert placed(begun(model_parallel(*targets), **workers)) == expected


def test_a_run_waits_for_the_tags_and_takes_workers_in_the_order_of_registration() -> None:
    simulation = begun(model_parallel(GPU, {"WorkerId": "z"}), x=ON_CPU, y=())
    assert not simulation.facts(MembersFormed)
    assert simulation.reason == (
        "partition 0 needs a worker tagged 'gpu'; partition 1 needs 'z'; registered are: x (cpu), y"
    )
    simulation, names = begun(model_parallel(GPU, CPU)), [f"w{n:02}" for n in range(40)]
    for now_s, name in enumerate(reversed(names), 1):
        simulation.now_s = float(now_s)
        simulation.come([name], tags=ON_GPU)
    simulation.come(["late"], tags=ON_CPU)
    assert placed(simulation) == (["w39", "late"], (0, 1))


def test_a_run_commits_every_stage_as_one_state() -> None:
    simulation = begun(model_parallel(GPU, GPU), x=ON_GPU, y=ON_GPU)
    simulation.until_due(RunSegment)
    assert simulation.due_one(RunSegment).ranks == (0, 1)
    simulation.until_due(CommitSegment)
    assert simulation.due_one(CommitSegment).parts == ((member("x"),), (member("y"),))
    simulation.complete()


def test_a_lost_stage_returns_all_to_the_last_commit_on_a_replacement() -> None:
    simulation = begun(model_parallel(GPU, GPU), x=ON_GPU, y=ON_GPU)
    simulation.until(SegmentCommitted)
    simulation.lose("y")
    simulation.queue.clear()
    assert placed(simulation) == (["x"], (0, 0))  # nobody else is there: x takes both
    before = simulation.due_one(RunSegment)
    simulation.lose("x")
    assert placed(simulation) == ([], ())
    simulation.come("zw", tags=ON_GPU)
    simulation.crash()
    after = simulation.due_one(RunSegment)
    assert after.lineage > before.lineage
    assert (before.segment, after.segment) == (2, 2)
    simulation.complete()


def test_replicas_share_no_worker_and_one_that_loses_its_own_goes_while_the_others_stay() -> None:
    simulation = begun(replicated(2, model_parallel(GPU, CPU)), **FOUR)
    assert placed(simulation) == (["a", "b", "d", "c"], (0, 1))
    simulation.until_due(RunSegment)
    effect = simulation.due_one(RunSegment)
    assert effect.num_shards == 2
    assert effect.parts == ((member("a"), member("d")), (member("b"), member("c")))
    simulation.lose("b")
    assert placed(simulation) == (["d", "c"], (0, 1))
    simulation.come("b", 1, tags=ON_CPU)
    assert placed(simulation) == (["d", "c", "a", "b"], (0, 1))


def test_replicas_are_as_many_as_there_are_workers_for() -> None:
    three = {name: FOUR[name] for name in "abc"}
    simulation = begun(replicated(3, model_parallel(GPU, CPU)), **three)
    assert placed(simulation) == (["a", "b"], (0, 1))
    simulation = begun(replicated(2, model_parallel(GPU, CPU), min_replicas=2), **three)
    assert not simulation.facts(MembersFormed)
    assert simulation.reason.startswith("the replicas need workers of their own; registered are: ")


LINEAR = {"module": "Linear", "kwargs": {"in_features": 2, "out_features": 2}}
EDGES = [{"source": "a", "target": "b"}, {"source": "b", "target": "c"}]
GRAPH = {"graph": {"nodes": [{"id": name, **LINEAR} for name in "abc"], "edges": EDGES}}


@pytest.mark.parametrize(
    ("node_ids", "expected"),
    [
        ([["a"], ["x"], ["b", "c"]], ".partitions[1].node_ids[0]: 'x' is no node"),
        ([["a", "b"], ["b", "c"]], ".partitions[1].node_ids[0]: node 'b' is claimed"),
        ([["a"], ["b"]], ".partitions: 'c': claimed by no partition"),
        ([["a", "c"], ["b"]], ".partitions: interleaved: partitions[0] needs"),
    ],
)
def test_partitions_that_do_not_tile_the_graph_are_refused(
    node_ids: list[list[str]], expected: str
) -> None:
    partitions = [{"node_ids": ids, "target": GPU} for ids in node_ids]
    direct = {"communication": {"protocol": "Direct"}, "partitions": partitions}
    strategy = {"type": "ModelParallel", **direct}
    for whole, place in (
        (strategy, "strategy"),
        (replicated(2, strategy), "strategy.options.inner"),
    ):
        found = JobSpec.from_json(job_text(whole, model=GRAPH))
        (violation,) = objections_to(found, BUILT_IN)
        assert str(violation).startswith(place + expected)
    tiled = JobSpec.from_json(job_text(model_parallel(GPU, GPU, CPU), model=GRAPH))
    assert objections_to(tiled, BUILT_IN) == []


def test_a_schedule_belongs_to_pipelines() -> None:
    with pytest.raises(InvalidInputError, match=r"options.schedule: must be one of|schedule"):
        JobSpec.from_json(job_text(model_parallel(GPU, schedule="fast")))
    direct = {**model_parallel(GPU, schedule="gpipe"), "communication": {"protocol": "Direct"}}
    with pytest.raises(InvalidInputError, match="belongs to Pipeline only, not to Direct"):
        JobSpec.from_json(job_text(direct))


@pytest.mark.parametrize(
    ("inner", "method", "expected"),
    [
        (
            {"type": "Custom", "coordinator": "mine", "config": None},
            "AllReduce",
            "strategy.options.inner: Custom/mine cannot be a replica, which takes part in every "
            "step; Local, ModelParallel and DataParallel can",
        ),
        (
            model_parallel(GPU, CPU),
            "Decentralized",
            "strategy.aggregation.method: a node of 'Decentralized' is one worker, and no pipeline "
            "over several; AllReduce and ParameterServer have replicas that are",
        ),
    ],
)
def test_a_replica_is_a_worker_or_a_pipeline_whose_gradients_are_summed(
    inner: dict[str, Any], method: str, expected: str
) -> None:
    topology = {"topology": "ring"} if method == "Decentralized" else {}
    strategy = {**replicated(2, inner), "aggregation": {"method": method, **topology}}
    found = JobSpec.from_json(job_text(strategy))
    assert [str(violation) for violation in objections_to(found, BUILT_IN)] == [expected]


def test_a_model_that_is_cut_is_evaluated_by_all_as_a_segment_without_steps() -> None:
    simulation = begun(evaluation_only(model_parallel(GPU, CPU)), a=ON_GPU, b=ON_CPU)
    simulation.until_due(RunSegment)
    segment = simulation.due_one(RunSegment)
    assert (segment.to_step, segment.evaluate) == (0, ("test",))
    simulation.complete()
    run = simulation.record
    assert run.reason == "20 rows of test evaluated"
    assert "train.loss" not in run.metrics
    assert "test.accuracy" in run.metrics


def test_without_an_evaluation_none_is_due_at_any_step() -> None:
    schedule = SegmentSchedule(num_steps=10, evaluate_every=None, checkpoint_every=4)
    assert schedule.ends() == (4, 8, 10)
    assert not any(schedule.evaluates_at(step) for step in range(11))
    evaluated = SegmentSchedule(num_steps=10, evaluate_every=3, checkpoint_every=4)
    assert evaluated.ends() == (3, 4, 6, 8, 9, 10)
    assert [step for step in range(1, 11) if evaluated.evaluates_at(step)] == [3, 6, 9, 10]


# ---- a run that trains nothing ----


def evaluating(workers: str, **changes: object) -> tuple[Simulation, EvaluateState]:
    """With the model built."""
    simulation = start(evaluation_only(DATA_PARALLEL, **changes), *workers)
    simulation.alone()
    return simulation, simulation.due_one(EvaluateState)


def test_it_evaluates_once_and_completes() -> None:
    simulation, effect = evaluating("ab")
    assert effect.members == (member("a"), member("b"))
    assert (effect.num_shards, effect.splits) == (3, ("test",))
    assert effect.member is None
    assert evaluating("a")[1].member == member("a"), "it is the only one"
    assert simulation.status.strategy_phase == "EVALUATING"
    assert simulation.status.num_steps == 7  # 20 rows, three at a time
    simulation.report(do(effect))
    simulation.complete()
    run, metrics = simulation.record, {"test.loss": 0.1}
    assert (run.reason, run.metrics) == ("20 rows of test evaluated", metrics)
    assert [(commit.segment, commit.metrics) for commit in run.commits] == [(0, metrics)]
    assert run.is_reproducible
    assert not simulation.facts(SegmentFinished)


def test_others_take_the_shards_of_a_lost_worker_and_a_new_one_helps() -> None:
    simulation, before = evaluating("ab")
    simulation.lose("a", reason="gone")
    effect = simulation.due_one(EvaluateState)
    assert (effect.members, effect.base) == ((member("b"),), before.base)
    assert simulation.status.phase is RunPhase.RECOVERING
    simulation.come("c")
    assert simulation.due_one(EvaluateState).members == (member("b"), member("c"))
    simulation.queue.clear()
    simulation.lose("bc", reason="gone")
    assert not simulation.due(EvaluateState)
    assert "no worker is available: a (gone)" in simulation.status.reason
    simulation.come("d")
    simulation.complete()


def test_three_processes_that_end_inside_it_fail_the_run() -> None:
    simulation, _ = evaluating("a")
    for count in range(3):
        simulation.tell(register("a", count + 1, ending("a", count, status=-11)))
    assert simulation.record.ended is RunPhase.FAILED
    assert simulation.record.reason == (
        "the evaluation has ended 3 worker processes; the last one, a, ended by SIGSEGV"
    )


def test_stopped_it_can_go_on() -> None:
    simulation, _ = evaluating("a")
    simulation.tell(CancelRun(RUN))
    simulation.run()
    simulation.tell(ResumeRun(RUN))
    simulation.complete()
    assert len(simulation.facts(MembersFormed)) == 2


def test_the_state_that_it_begins_from_and_its_predictions_are_kept_as_long_as_it() -> None:
    given, told = digest("given"), digest("predictions")
    evaluation = {"split": "test", "predictions": True}
    simulation, effect = evaluating("a", initial={"digest": given}, evaluation=evaluation)
    assert given in live_blobs(simulation.state)
    simulation.report(do(effect).model_copy(update={"predictions": told}))
    simulation.complete()
    assert simulation.record.predictions == told
    assert told in live_blobs(simulation.state)
    assert is_shared(simulation.state, told)
