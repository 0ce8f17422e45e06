"""Placement of partitions and of replicas of pipelines, in the pure core."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.commands import LoseWorker
from stratagem.coordinator.core.effects import CommitSegment, RunSegment
from stratagem.coordinator.core.facts import MembersFormed, SegmentCommitted
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.pending_effects import pending
from stratagem.coordinator.core.state_machine.strategy_boundary import objections_to
from stratagem.coordinator.runtime.plugins import BUILT_IN
from stratagem.coordinator.strategies.scheduling.segment_schedule import SegmentSchedule
from tests.coordinator.core.jobs import evaluation_only, job_text
from tests.coordinator.core.simulation import RUN, Simulation, member, reason, register
from tests.coordinator.core.simulation import start as started

pytestmark = pytest.mark.core


def model_parallel(*targets: dict[str, str], **options: Any) -> dict[str, Any]:
    """One node per partition: a, b, c."""
    return {
        "type": "ModelParallel",
        "partitions": [
            {"node_ids": [node], "target": target}
            for node, target in zip("abc", targets, strict=False)
        ],
        "communication": {"protocol": "Pipeline", "micro_batch_size": 3},
        "options": options,
    }


def replicated(num_replicas: int, inner: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {
        "type": "DataParallel",
        "num_replicas": num_replicas,
        "aggregation": {"method": "AllReduce"},
        "options": {"inner": inner, **options},
    }


GPU, CPU = {"Tag": "gpu"}, {"Tag": "cpu"}


def start(strategy: dict[str, Any], **workers: tuple[str, ...]) -> Simulation:
    """Workers by name with their tags, in order of registration."""
    simulation = started(job_text(strategy))
    for name, tags in workers.items():
        simulation.tell(register(name, tags=tags))
    return simulation


def placed(simulation: Simulation) -> tuple[list[str], tuple[int, ...]]:
    formed = simulation.facts(MembersFormed)[-1]
    assert isinstance(formed, MembersFormed)
    return [m.worker_id for m in formed.members], formed.ranks


def segment(simulation: Simulation) -> RunSegment:
    (found,) = [e for e in pending(simulation.state) if isinstance(e, RunSegment)]
    return found


def until_training(simulation: Simulation) -> None:
    while not any(isinstance(e, RunSegment) for e in pending(simulation.state)):
        simulation.tell(simulation.queue.popleft())


@pytest.mark.parametrize(
    ("targets", "workers", "expected"),
    [
        ([GPU, CPU], {"x": ("cpu",), "y": ("gpu",)}, (["y", "x"], (0, 1))),
        ([GPU, GPU], {"x": ("gpu",), "y": ("gpu",)}, (["x", "y"], (0, 1))),
        ([GPU, GPU, GPU], {"x": ("gpu",), "y": ("gpu",)}, (["x", "y"], (0, 1, 0))),
        ([GPU, {"WorkerId": "x"}, GPU], {"x": (), "y": ("gpu",)}, (["y", "x"], (0, 1, 0))),
        ([GPU, GPU], {"x": ("gpu",)}, (["x"], (0, 0))),
    ],
)
def test_partitions_go_to_the_first_registered_worker_that_fits(
    targets: list[dict[str, str]],
    workers: dict[str, tuple[str, ...]],
    expected: tuple[list[str], tuple[int, ...]],
) -> None:
    simulation = started(job_text(model_parallel(*targets)))
    for name, tags in workers.items():
        simulation.tell(register(name, tags=tags))
    assert placed(simulation) == expected


def test_many_workers_are_taken_in_the_order_in_which_they_registered() -> None:
    simulation, names = started(job_text(model_parallel(GPU, CPU))), [f"w{n:02}" for n in range(40)]
    for now_s, name in enumerate(reversed(names), 1):
        simulation.now_s = float(now_s)
        simulation.tell(register(name, tags=("gpu",)))
    simulation.tell(register("late", tags=("cpu",)))
    assert placed(simulation) == (["w39", "late"], (0, 1))


def test_run_waits_for_the_tags_and_names_them() -> None:
    simulation = start(model_parallel(GPU, {"WorkerId": "z"}), x=("cpu",), y=())
    assert not simulation.facts(MembersFormed)
    assert reason(simulation) == (
        "partition 0 needs a worker tagged 'gpu'; partition 1 needs 'z'; registered are: x (cpu), y"
    )


def test_a_run_commits_every_stage_as_one_state() -> None:
    simulation = start(model_parallel(GPU, GPU), x=("gpu",), y=("gpu",))
    until_training(simulation)
    assert segment(simulation).ranks == (0, 1)
    while not [e for e in pending(simulation.state) if isinstance(e, CommitSegment)]:
        simulation.tell(simulation.queue.popleft())
    (commit,) = [e for e in pending(simulation.state) if isinstance(e, CommitSegment)]
    assert commit.parts == ((member("x"),), (member("y"),))
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_a_lost_stage_returns_all_to_the_last_commit_on_a_replacement() -> None:
    simulation = start(model_parallel(GPU, GPU), x=("gpu",), y=("gpu",))
    while len(simulation.facts(SegmentCommitted)) < 1:
        simulation.tell(simulation.queue.popleft())
    simulation.tell(LoseWorker(member("y"), "killed"))
    simulation.queue.clear()
    assert placed(simulation) == (["x"], (0, 0))  # nobody else is there: x takes both
    before = segment(simulation)
    simulation.tell(LoseWorker(member("x"), "killed"))
    assert placed(simulation) == ([], ())
    simulation.tell(register("z", tags=("gpu",)))
    simulation.tell(register("w", tags=("gpu",)))
    simulation.seen.clear()
    simulation.crash()
    after = segment(simulation)
    assert after.lineage > before.lineage
    assert (before.segment, after.segment) == (2, 2)
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_replicas_share_no_worker() -> None:
    strategy = replicated(2, model_parallel(GPU, CPU))
    simulation = start(strategy, a=("gpu",), b=("cpu",), c=("cpu",), d=("gpu",))
    assert placed(simulation) == (["a", "b", "d", "c"], (0, 1))
    until_training(simulation)
    effect = segment(simulation)
    assert effect.num_shards == 2
    assert effect.parts == ((member("a"), member("d")), (member("b"), member("c")))


def test_replicas_are_as_many_as_there_are_workers_for() -> None:
    strategy = replicated(3, model_parallel(GPU, CPU))
    simulation = start(strategy, a=("gpu",), b=("cpu",), c=("cpu",))
    assert placed(simulation) == (["a", "b"], (0, 1))
    strict = replicated(2, model_parallel(GPU, CPU), min_replicas=2)
    simulation = start(strict, a=("gpu",), b=("cpu",), c=("cpu",))
    assert not simulation.facts(MembersFormed)
    assert reason(simulation).startswith("the replicas need workers of their own; registered are: ")


def test_a_replica_that_loses_a_worker_goes_and_the_others_stay() -> None:
    strategy = replicated(2, model_parallel(GPU, CPU))
    simulation = start(strategy, a=("gpu",), b=("cpu",), c=("cpu",), d=("gpu",))
    until_training(simulation)
    simulation.tell(LoseWorker(member("b"), "killed"))
    assert placed(simulation) == (["d", "c"], (0, 1))
    simulation.tell(register("b", start=1, tags=("cpu",)))
    assert placed(simulation) == (["d", "c", "a", "b"], (0, 1))


GRAPH = {
    "graph": {
        "nodes": [
            {"id": name, "module": "Linear", "kwargs": {"in_features": 2, "out_features": 2}}
            for name in "abc"
        ],
        "edges": [{"source": "a", "target": "b"}, {"source": "b", "target": "c"}],
    }
}


@pytest.mark.parametrize(
    ("node_ids", "expected"),
    [
        ([["a"], ["x"], ["b", "c"]], "strategy.partitions[1].node_ids[0]: 'x' is no node"),
        ([["a", "b"], ["b", "c"]], "strategy.partitions[1].node_ids[0]: node 'b' is claimed"),
        ([["a"], ["b"]], "strategy.partitions: 'c': claimed by no partition"),
        ([["a", "c"], ["b"]], "strategy.partitions: interleaved: partitions[0] needs"),
    ],
)
def test_partitions_that_do_not_tile_the_graph_are_refused(
    node_ids: list[list[str]], expected: str
) -> None:
    strategy = {
        "type": "ModelParallel",
        "partitions": [{"node_ids": ids, "target": GPU} for ids in node_ids],
        "communication": {"protocol": "Direct"},
    }
    for whole, place in (
        (strategy, "strategy"),
        (replicated(2, strategy), "strategy.options.inner"),
    ):
        found = JobSpec.from_json(job_text(whole, model=GRAPH))
        (violation,) = objections_to(found, BUILT_IN)
        assert str(violation).startswith(expected.replace("strategy", place, 1))


def test_a_schedule_belongs_to_pipelines() -> None:
    with pytest.raises(InvalidInputError, match=r"options.schedule: must be one of|schedule"):
        JobSpec.from_json(job_text(model_parallel(GPU, schedule="fast")))
    direct = {**model_parallel(GPU, schedule="gpipe"), "communication": {"protocol": "Direct"}}
    with pytest.raises(InvalidInputError, match="belongs to Pipeline only, not to Direct"):
        JobSpec.from_json(job_text(direct))


def test_partitions_that_tile_the_graph_are_taken() -> None:
    found = JobSpec.from_json(job_text(model_parallel(GPU, GPU, CPU), model=GRAPH))
    assert objections_to(found, BUILT_IN) == []


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
    simulation = started(evaluation_only(model_parallel(GPU, CPU)))
    simulation.tell(register("a", tags=("gpu",)))
    simulation.tell(register("b", tags=("cpu",)))
    until_training(simulation)
    assert (segment(simulation).to_step, segment(simulation).evaluate) == (0, ("test",))
    simulation.run()
    run = simulation.state.runs[RUN]
    assert (run.ended, run.reason) == (RunPhase.COMPLETED, "20 rows of test evaluated")
    assert "train.loss" not in run.metrics
    assert "test.accuracy" in run.metrics


def test_without_an_evaluation_none_is_due_at_any_step() -> None:
    schedule = SegmentSchedule(num_steps=10, evaluate_every=None, checkpoint_every=4)
    assert schedule.ends() == (4, 8, 10)
    assert not any(schedule.evaluates_at(step) for step in range(11))
    evaluated = SegmentSchedule(num_steps=10, evaluate_every=3, checkpoint_every=4)
    assert evaluated.ends() == (3, 4, 6, 8, 9, 10)
    assert [step for step in range(1, 11) if evaluated.evaluates_at(step)] == [3, 6, 9, 10]
