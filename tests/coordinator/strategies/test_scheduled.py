"""Jobs whose hyperparameters and seed change by step, in the pure core."""

from dataclasses import replace
from typing import Any

import pytest

from stratagem.common.job import JobSpec, entry_points
from stratagem.coordinator.core.commands import CancelRun, ResumeRun
from stratagem.coordinator.core.effects import Base, RunSegment
from stratagem.coordinator.core.facts import ROOT, MembersFormed, RunCompleted, SegmentCommitted
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.strategies import nested
from tests.coordinator.core.jobs import DATA_PARALLEL, FEDERATED, LOCAL, job_text, refusal
from tests.coordinator.core.simulation import RUN, Simulation, start

pytestmark = pytest.mark.core


SETTINGS: list[dict[str, Any]] = [
    {"from_step": 0, "seed": 1, "params": {"optimizer.lr": 0.1}},
    {"from_step": 10, "seed": 2, "params": {"optimizer.lr": 0.2}},
    {"from_step": 15, "seed": 3, "params": {}},
]


def scheduled(strategy: dict[str, Any] = LOCAL, **changes: Any) -> str:
    sections: dict[str, Any] = {
        "epochs": None,
        "steps": 30,
        "checkpoint": {"every": "5 steps"},
        "optimizer": {"name": "sgd", "lr": 0.5},
        "hyperparameter_schedule": {"settings": SETTINGS, "last_step": 20},
        **changes,
    }
    return job_text(strategy, **sections)


def trained_with(simulation: Simulation) -> tuple[int, float]:
    """The seed and the rate that the run trains with now."""
    run = simulation.record
    own = run.strategy.party_job(run.job, run.value, ROOT)
    assert own.hyperparameter_schedule is None
    assert own.optimizer.lr is not None
    return own.seed, own.optimizer.lr


def trained(simulation: Simulation, *, crashes: bool = False) -> dict[int, tuple[float, ...]]:
    """What each segment is trained with from now on, by the step at which it ends."""
    seen: dict[int, tuple[float, ...]] = {}
    while True:
        for effect in simulation.due(RunSegment):
            seen[effect.to_step] = (*trained_with(simulation), effect.num_steps, effect.lineage)
        if not simulation.queue:
            return seen
        simulation.step()
        if crashes:
            simulation.crash()


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL])
@pytest.mark.parametrize("crashes", [False, True])
def test_each_setting_holds_until_the_next_begins(strategy: dict[str, Any], crashes: bool) -> None:
    simulation = start(scheduled(strategy), "a", "b", "c")
    assert trained_with(simulation) == (1, 0.1)
    # The rates are on their way to the end of the job, not to that of the schedule.
    assert trained(simulation, crashes=crashes) == {
        5: (1, 0.1, 30, 0),
        10: (1, 0.1, 30, 0),
        15: (2, 0.2, 30, 1),
        20: (3, 0.5, 30, 2),
    }
    assert simulation.fact(RunCompleted).reason == "20 steps committed"
    assert simulation.facts(SegmentCommitted)[-1].step == 20
    assert simulation.record.ended is RunPhase.COMPLETED
    shown = simulation.status
    assert (shown.step, shown.num_steps, shown.segment, shown.num_segments) == (20, 20, 4, 4)


def test_it_waits_for_workers_and_those_that_are_left_go_on_under_the_setting() -> None:
    simulation = start(scheduled(DATA_PARALLEL), "a", "b", "c")
    while trained_with(simulation)[0] != 2:
        simulation.step()
    simulation.lose("a", reason="it was killed")
    simulation.complete()
    assert len(simulation.facts(MembersFormed)[-1].members) == 2
    assert [fact.step for fact in simulation.facts(SegmentCommitted)] == [5, 10, 15, 20]
    shown = start(scheduled()).status
    assert (shown.phase, shown.num_segments) == (RunPhase.PLACING, 0)


def stopped(num_commits: int, text: str) -> Simulation:
    """A run that was stopped, and that nobody holds, after so many commits."""
    simulation = start(text, "a", "b", "c")
    while len(simulation.record.commits) < num_commits:
        simulation.step()
    simulation.tell(CancelRun(RUN))
    simulation.run()
    return simulation


@pytest.mark.parametrize(
    ("strategy", "segment"), [(LOCAL, 0), (DATA_PARALLEL, 1), (LOCAL, 2), (DATA_PARALLEL, 3)]
)
def test_from_an_earlier_commit_it_trains_again_as_it_did(
    strategy: dict[str, Any], segment: int
) -> None:
    text = scheduled(strategy, retention=8)
    undisturbed = trained(start(text, "a", "b", "c"))
    assert list(undisturbed) == [5, 10, 15, 20]
    simulation = stopped(4, text)
    commit = simulation.record.commits[segment]
    simulation.tell(ResumeRun(RUN, from_segment=segment))
    simulation.crash()
    committed = nested.progress(simulation.record.value.child).committed
    assert committed
    assert (committed.step, committed.digest) == (segment * 5, commit.digest)
    again = {step: own[:3] for step, own in trained(simulation).items()}
    assert again == {step: own[:3] for step, own in undisturbed.items() if step > segment * 5}
    run = simulation.record
    assert (run.ended, run.is_reproducible) == (RunPhase.COMPLETED, True)
    assert [each.step for each in run.commits] == [0, 5, 10, 15, 20]


@pytest.mark.parametrize("round_num", [1, 2])
def test_a_federation_counts_rounds_and_goes_back_to_one_and_its_setting(round_num: int) -> None:
    settings = [SETTINGS[0], {**SETTINGS[1], "from_step": 2}]
    changes = {"hyperparameter_schedule": {"settings": settings}, "retention": 8}
    simulation = stopped(3, scheduled(FEDERATED, steps=None, checkpoint=None, **changes))
    simulation.tell(ResumeRun(RUN, from_segment=round_num))
    assert trained_with(simulation) == ((1, 0.1) if round_num == 1 else (2, 0.2))
    simulation.complete()
    assert simulation.fact(RunCompleted).reason == "3 rounds committed"
    assert [commit.segment for commit in simulation.record.commits] == [0, 1, 2, 3]
    assert trained_with(simulation) == (2, 0.2)


def test_a_child_without_a_way_back_goes_on_from_the_commit_as_from_any_state() -> None:
    """As a strategy of a plug-in may be, which says only how it is given a state."""
    simulation = stopped(4, scheduled(retention=8))
    child = simulation.record.value.child
    nesting = replace(child.strategy.nesting, returned=None)
    commit = simulation.record.commits[1]
    base = Base(commit.segment, commit.step, commit.digest)
    other = replace(child, strategy=replace(child.strategy, nesting=nesting))
    back = nested.returned(other, base, {})
    num_rows = nested.progress(child).num_rows
    assert num_rows
    assert back == nested.rebased(other, child.job, base, num_rows, child.horizon)
    committed = nested.progress(back).committed
    assert committed
    assert committed.digest == base.digest


STOP = {"metrics": ["accuracy"], "best": "accuracy", "every": "5 steps", "stop": {"patience": 2}}
NO_STOP = {"evaluation": {**STOP, "stop": None}}
PLATEAU = {"name": "sgd", "lr": 0.5, "schedule": {"name": "plateau", "factor": 0.5, "patience": 2}}
EVALUATION = {"metrics": ["accuracy"], "best": "accuracy", "every": "1 epoch"}
CUSTOM = {"type": "Custom", "coordinator": "mine", "config": {}}
OF_PLATEAU = {"optimizer__schedule__name": "plateau", "optimizer__schedule__patience": 2}


def with_params(**params: Any) -> dict[str, Any]:
    named = {name.replace("__", "."): value for name, value in params.items()}
    changed = {**SETTINGS[1], "params": named}
    return {"hyperparameter_schedule": {"settings": [SETTINGS[0], changed]}}


def with_steps(*steps: int, **more: Any) -> dict[str, Any]:
    settings = [{**SETTINGS[0], "from_step": step} for step in steps]
    return {"hyperparameter_schedule": {"settings": settings, **more}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (with_steps(5), "hyperparameter_schedule.settings[0].from_step: 5 is not allowed"),
        (with_steps(0, 10, 10), "hyperparameter_schedule.settings[2].from_step: 10 must be"),
        (with_steps(0, 10, last_step=10), "hyperparameter_schedule.last_step: 10 must be"),
        (with_steps(0, last_step=31), "hyperparameter_schedule.last_step: 31 is more than"),
        (with_steps(0, 7), "checkpoint.every: must be a divisor of 7"),
        ({"checkpoint": {"every": "1 epoch"}}, "checkpoint.every: '1 epoch' is not allowed"),
        ({"evaluation": EVALUATION}, "evaluation.every: '1 epoch' is not allowed with"),
        ({"steps": None, "epochs": 3}, "steps: missing; hyperparameter_schedule counts"),
        ({"evaluation": STOP}, "evaluation.stop: is not allowed with"),
        ({"optimizer": PLATEAU, **NO_STOP}, "optimizer.schedule: is not allowed with"),
        (
            {"initial": {"run": "earlier", "resume": True}},
            "initial.resume: is not possible with hyp",
        ),
        ({"strategy": CUSTOM}, "hyperparameter_schedule: is not possible with strategy Custom"),
        (with_params(batch_size=3), "hyperparameter_schedule.settings[1].params.batch_size"),
        (
            with_params(optimizer__name="adam"),
            "hyperparameter_schedule.settings[1].params.optimizer.name: must be that of the first",
        ),
        (
            with_params(optimizer__lr=-1.0),
            "hyperparameter_schedule.settings[1].params: optimizer.lr: -1.0 is not allowed",
        ),
        (
            with_params(optimizer__betas=[1, 2]),
            "hyperparameter_schedule.settings[1].params: optimizer.betas",
        ),
        (
            {**with_params(**OF_PLATEAU), **NO_STOP},
            "hyperparameter_schedule.settings[1].params: plateau is not allowed",
        ),
    ],
)
def test_what_cannot_be_trained_so_is_refused_by_name(
    changes: dict[str, Any], expected: str
) -> None:
    assert refusal(scheduled(changes.pop("strategy", LOCAL), **changes)).startswith(expected)


def test_entry_points_of_settings_are_allowed() -> None:
    first = {**SETTINGS[0], "params": {"optimizer.entrypoint": "mine:Optimizer"}}
    schedule = {"settings": [first]}
    assert "mine:Optimizer" in entry_points(
        JobSpec.from_json(scheduled(hyperparameter_schedule=schedule))
    )
