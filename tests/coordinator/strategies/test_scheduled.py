"""Jobs whose hyperparameters and seed change by step, in the pure core."""

from dataclasses import replace
from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Party
from stratagem.common.job import JobSpec, entry_points
from stratagem.coordinator.core.commands import CancelRun, LoseWorker, ResumeRun
from stratagem.coordinator.core.effects import Base, RunSegment
from stratagem.coordinator.core.facts import MembersFormed, RunCompleted, SegmentCommitted
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.decide import world_of
from stratagem.coordinator.core.state_machine.pending_effects import pending
from stratagem.coordinator.strategies import nested
from tests.coordinator.core.jobs import DATA_PARALLEL, FEDERATED, LOCAL, check_at_submit, job_text
from tests.coordinator.core.simulation import RUN, Simulation, member, start

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
    run = simulation.state.runs[RUN]
    own = run.strategy.party_job(run.job, run.value, Party(""))
    assert own.hyperparameter_schedule is None
    assert own.optimizer.lr is not None
    return own.seed, own.optimizer.lr


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL])
@pytest.mark.parametrize("crashes", [False, True])
def test_each_setting_holds_until_the_next_begins(strategy: dict[str, Any], crashes: bool) -> None:
    simulation, seen = start(scheduled(strategy), "a", "b", "c"), {}
    assert trained_with(simulation) == (1, 0.1)
    while simulation.queue:
        simulation.tell(simulation.queue.popleft())
        if crashes:
            simulation.crash()
        for effect in pending(simulation.state):
            if isinstance(effect, RunSegment):
                seen[effect.to_step] = (*trained_with(simulation), effect.num_steps, effect.lineage)
    # The rates are on their way to the end of the job, not to that of the schedule.
    assert seen == {
        5: (1, 0.1, 30, 0),
        10: (1, 0.1, 30, 0),
        15: (2, 0.2, 30, 1),
        20: (3, 0.5, 30, 2),
    }
    (done,) = simulation.facts(RunCompleted)
    assert done.reason == "20 steps committed"
    assert simulation.facts(SegmentCommitted)[-1].step == 20
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED
    shown = run.strategy.status(run.job, run.value, world_of(simulation.state))
    assert (shown.step, shown.num_steps, shown.segment, shown.num_segments) == (20, 20, 4, 4)


def test_the_members_that_are_left_go_on_under_the_setting() -> None:
    simulation = start(scheduled(DATA_PARALLEL), "a", "b", "c")
    while trained_with(simulation)[0] != 2:
        simulation.tell(simulation.queue.popleft())
    simulation.tell(LoseWorker(member("a"), "it was killed"))
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
    assert len(simulation.facts(MembersFormed)[-1].members) == 2
    assert [fact.step for fact in simulation.facts(SegmentCommitted)] == [5, 10, 15, 20]


def stopped(num_commits: int, text: str) -> Simulation:
    """A run that was stopped, and that nobody holds, after so many commits."""
    simulation = start(text, "a", "b", "c")
    while len(simulation.state.runs[RUN].commits) < num_commits:
        simulation.tell(simulation.queue.popleft())
    simulation.tell(CancelRun(RUN))
    simulation.run()
    return simulation


def trained(simulation: Simulation) -> dict[int, object]:
    """What each segment is trained with from now on, by the step at which it ends."""
    seen: dict[int, object] = {}
    while True:
        for effect in pending(simulation.state):
            if isinstance(effect, RunSegment):
                seen[effect.to_step] = (*trained_with(simulation), effect.num_steps)
        if not simulation.queue:
            return seen
        simulation.tell(simulation.queue.popleft())


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL])
@pytest.mark.parametrize("segment", [0, 1, 2, 3])
def test_from_an_earlier_commit_it_trains_again_as_it_did(
    strategy: dict[str, Any], segment: int
) -> None:
    text = scheduled(strategy, retention=8)
    undisturbed = trained(start(text, "a", "b", "c"))
    assert list(undisturbed) == [5, 10, 15, 20]
    simulation = stopped(4, text)
    commit = simulation.state.runs[RUN].commits[segment]
    simulation.tell(ResumeRun(RUN, from_segment=segment))
    simulation.crash()
    committed = nested.progress(simulation.state.runs[RUN].value.child).committed
    assert committed
    assert (committed.step, committed.digest) == (segment * 5, commit.digest)
    again = trained(simulation)
    assert again == {step: own for step, own in undisturbed.items() if step > segment * 5}
    run = simulation.state.runs[RUN]
    assert (run.ended, run.is_reproducible) == (RunPhase.COMPLETED, True)
    assert [each.step for each in run.commits] == [0, 5, 10, 15, 20]


@pytest.mark.parametrize("round_num", [1, 2])
def test_a_federation_goes_back_to_a_round_and_its_setting(round_num: int) -> None:
    settings = [SETTINGS[0], {**SETTINGS[1], "from_step": 2}]
    changes = {"hyperparameter_schedule": {"settings": settings}, "retention": 8}
    simulation = stopped(3, scheduled(FEDERATED, steps=None, checkpoint=None, **changes))
    simulation.tell(ResumeRun(RUN, from_segment=round_num))
    assert trained_with(simulation) == ((1, 0.1) if round_num == 1 else (2, 0.2))
    simulation.run()
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED
    assert [commit.segment for commit in run.commits] == [0, 1, 2, 3]
    assert trained_with(simulation) == (2, 0.2)


def test_a_child_without_a_way_back_goes_on_from_the_commit_as_from_any_state() -> None:
    """As a strategy of a plug-in may be, which says only how it is given a state."""
    simulation = stopped(4, scheduled(retention=8))
    child = simulation.state.runs[RUN].value.child
    nesting = replace(child.strategy.nesting, returned=None)
    commit = simulation.state.runs[RUN].commits[1]
    base = Base(commit.segment, commit.step, commit.digest)
    other = replace(child, strategy=replace(child.strategy, nesting=nesting))
    back = nested.returned(other, base, {})
    num_rows = nested.progress(child).num_rows
    assert num_rows
    assert back == nested.rebased(other, child.job, base, num_rows, child.horizon)
    committed = nested.progress(back).committed
    assert committed
    assert committed.digest == base.digest


def test_before_there_are_workers_it_says_what_it_waits_for() -> None:
    simulation = start(scheduled())
    run = simulation.state.runs[RUN]
    shown = run.strategy.status(run.job, run.value, world_of(simulation.state))
    assert (shown.phase, shown.num_segments) == (RunPhase.PLACING, 0)


def test_rounds_of_a_federation_are_counted() -> None:
    settings = [SETTINGS[0], {**SETTINGS[1], "from_step": 2}]
    schedule = {"settings": settings}
    text = scheduled(FEDERATED, steps=None, checkpoint=None, hyperparameter_schedule=schedule)
    simulation = start(text, "a", "b")
    simulation.run()
    assert simulation.facts(RunCompleted)[0].reason == "3 rounds committed"
    assert trained_with(simulation) == (2, 0.2)


STOP = {"metrics": ["accuracy"], "best": "accuracy", "every": "5 steps", "stop": {"patience": 2}}
PLATEAU = {"name": "sgd", "lr": 0.5, "schedule": {"name": "plateau", "factor": 0.5, "patience": 2}}
EVALUATION = {"metrics": ["accuracy"], "best": "accuracy", "every": "1 epoch"}
GENERATIONS: dict[str, Any] = {
    "type": "PopulationBased",
    "population_size": 2,
    "generations": 2,
    "exploit": {"method": "Truncation", "fraction": 0.5},
    "explore": {"method": "Resample"},
}


def with_params(**params: Any) -> dict[str, Any]:
    named = {name.replace("__", "."): value for name, value in params.items()}
    changed = {**SETTINGS[1], "params": named}
    return {"hyperparameter_schedule": {"settings": [SETTINGS[0], changed]}}


def with_steps(*steps: int, **more: Any) -> dict[str, Any]:
    settings = [{**SETTINGS[0], "from_step": step} for step in steps]
    return {"hyperparameter_schedule": {"settings": settings, **more}}


@pytest.mark.parametrize(
    ("strategy", "changes", "expected"),
    [
        (LOCAL, with_steps(5), "hyperparameter_schedule.settings[0].from_step: 5 is not allowed"),
        (LOCAL, with_steps(0, 10, 10), "hyperparameter_schedule.settings[2].from_step: 10 must be"),
        (LOCAL, with_steps(0, 10, last_step=10), "hyperparameter_schedule.last_step: 10 must be"),
        (LOCAL, with_steps(0, last_step=31), "hyperparameter_schedule.last_step: 31 is more than"),
        (LOCAL, with_steps(0, 7), "checkpoint.every: must be a divisor of 7"),
        (LOCAL, {"checkpoint": {"every": "1 epoch"}}, "checkpoint.every: '1 epoch' is not allowed"),
        (LOCAL, {"evaluation": EVALUATION}, "evaluation.every: '1 epoch' is not allowed with"),
        (LOCAL, {"steps": None, "epochs": 3}, "steps: missing; hyperparameter_schedule counts"),
        (LOCAL, {"evaluation": STOP}, "evaluation.stop: is not allowed with"),
        (
            LOCAL,
            {"optimizer": PLATEAU, "evaluation": {**STOP, "stop": None}},
            "optimizer.schedule: is not allowed with",
        ),
        (
            LOCAL,
            {"initial": {"run": "earlier", "resume": True}},
            "initial.resume: is not possible with hyperparameter_schedule",
        ),
        (
            {"type": "Custom", "coordinator": "mine", "config": {}},
            {},
            "hyperparameter_schedule: is not possible with strategy Custom",
        ),
        (LOCAL, with_params(batch_size=3), "hyperparameter_schedule.settings[1].params.batch_size"),
        (
            LOCAL,
            with_params(optimizer__name="adam"),
            "hyperparameter_schedule.settings[1].params.optimizer.name: must be that of the first",
        ),
        (
            LOCAL,
            with_params(optimizer__lr=-1.0),
            "hyperparameter_schedule.settings[1].params: optimizer.lr: -1.0 is not allowed",
        ),
        (
            LOCAL,
            with_params(optimizer__betas=[1, 2]),
            "hyperparameter_schedule.settings[1].params: optimizer.betas",
        ),
        (
            LOCAL,
            {
                **with_params(optimizer__schedule__name="plateau", optimizer__schedule__patience=2),
                "evaluation": {**STOP, "stop": None},
            },
            "hyperparameter_schedule.settings[1].params: plateau is not allowed",
        ),
    ],
)
def test_what_cannot_be_trained_so_is_refused_by_name(
    strategy: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_at_submit(scheduled(strategy, **changes))
    assert str(caught.value).startswith(expected)


def test_entry_points_of_settings_are_allowed() -> None:
    first = {**SETTINGS[0], "params": {"optimizer.entrypoint": "mine:Optimizer"}}
    schedule = {"settings": [first]}
    assert "mine:Optimizer" in entry_points(
        JobSpec.from_json(scheduled(hyperparameter_schedule=schedule))
    )
