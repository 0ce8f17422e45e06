"""What a strategy that fails, or is gone, does to its own run and to others: only the former."""

import sys
import types
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NoReturn

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Party, RunId
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.commands import ReportTrouble, SubmitRun
from stratagem.coordinator.core.facts import (
    ROOT,
    Noted,
    PartyFailed,
    RunCompleted,
    RunFailed,
    RunSubmitted,
)
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.core.state import CoordinatorState, RunPhase, World
from stratagem.coordinator.core.state_machine import decide
from stratagem.coordinator.core.state_machine.apply import apply
from stratagem.coordinator.core.state_machine.strategy_boundary import (
    objections_to,
    parties_of,
    status_of,
)
from stratagem.coordinator.core.strategy_table import GROUP, Strategies
from stratagem.coordinator.runtime.plugins import BUILT_IN, with_plugins
from stratagem.coordinator.strategies import nested
from stratagem.coordinator.strategies.synchronous.local import STRATEGY as local
from tests.coordinator.core.jobs import FEDERATED, LOCAL, POPULATION_SECTIONS, job_text, population
from tests.coordinator.core.raising_strategies import _raise, raising, with_local
from tests.coordinator.core.simulation import RUN, Simulation, digest, register, start

pytestmark = pytest.mark.core

BROKEN = RunId("broken")
THEIRS = {"type": "Custom", "coordinator": "Theirs", "config": None}


CALLED_IN_EACH_RUN = ["init", "decide", "transition", "pending", "reject_reason"]


@pytest.mark.parametrize("function", [*CALLED_IN_EACH_RUN, "own_deaths", "own_reform"])
def test_strategy_that_raises_fails_its_own_run_only(
    function: str,
) -> None:
    simulation = start(job_text(FEDERATED), "a", strategies=raising(function))
    simulation.tell(SubmitRun(BROKEN, job_text(LOCAL), 0.0))
    simulation.tell(ReportTrouble(BROKEN, ROOT, 1, "cut off"))
    simulation.tell(register("a", 1))
    simulation.run()
    broken = simulation.state.runs[BROKEN]
    assert broken.ended is RunPhase.FAILED
    assert broken.reason == "the strategy raised ZeroDivisionError: by zero"
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
    state = simulation.state
    simulation.crash()
    assert simulation.state == state, "a replay meets the same errors"


@pytest.mark.parametrize("function", ["own_deadline", "status", "own_parties"])
def test_one_that_cannot_say_how_it_stands_may_still_train(
    function: str,
) -> None:
    simulation = start(job_text(LOCAL), "a", strategies=raising(function))
    run = simulation.state.runs[RUN]
    status = status_of(run, simulation.agenda.world)
    assert (status.reason == "the strategy raised ZeroDivisionError: by zero") is (
        function == "status"
    )
    assert function != "own_parties" or parties_of(run) == {}
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_a_check_that_raises_refuses_the_job() -> None:
    simulation = Simulation(raising("check"))
    with pytest.raises(InvalidInputError, match="strategy: the strategy raised ZeroDivisionError"):
        simulation.tell(SubmitRun(RUN, job_text(LOCAL), 0.0))


def test_one_that_decides_in_a_circle_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    circling = replace(local, decide=lambda *_: Noted(party=ROOT, kind="again", data={}))
    monkeypatch.setattr(decide, "MAX_DECISIONS", 7)
    run = start(job_text(LOCAL), strategies=with_local(circling)).state.runs[RUN]
    assert run.ended is RunPhase.FAILED
    assert run.reason == "the strategy decides in a circle: 7 facts, the next one Noted"


@pytest.mark.parametrize("name", sorted(BUILT_IN.built_in))
def test_custom_cannot_name_what_is_built_in(name: str) -> None:
    """Each reads a strategy of its own type, and would fail on this one after it was accepted."""
    custom = {"type": "Custom", "coordinator": name, "config": None}
    with pytest.raises(InvalidInputError, match=f"strategy.coordinator: '{name}' is built in"):
        Simulation().tell(SubmitRun(RUN, job_text(custom), 0.0))


def test_what_a_journal_holds_of_it_does_not_keep_the_coordinator_from_starting() -> None:
    custom = {"type": "Custom", "coordinator": "Federated", "config": None}
    submitted = RunSubmitted(job_json=job_text(custom), wall_s=0.0)
    state = apply(CoordinatorState(BUILT_IN), RUN, submitted, 0.0)
    assert "is not installed" in status_of(state.runs[RUN], World({}, {})).reason


def test_a_package_that_cannot_be_imported_is_named() -> None:
    point = EntryPoint("Broken", "stratagem.no_such_module:STRATEGY", GROUP)
    simulation = Simulation(with_plugins([point]))
    custom = {"type": "Custom", "coordinator": "Broken", "config": None}
    reason = "'Broken' cannot be imported: ModuleNotFoundError: No module named"
    with pytest.raises(InvalidInputError, match=reason):
        simulation.tell(SubmitRun(RUN, job_text(custom), 0.0))


def test_a_package_that_exits_while_it_is_imported_is_named_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exits_at_import.py").write_text("import sys\nsys.exit('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    simulation = Simulation(with_plugins([EntryPoint("Exits", "exits_at_import:it", GROUP)]))
    custom = {"type": "Custom", "coordinator": "Exits", "config": None}
    with pytest.raises(InvalidInputError, match=r"'Exits' cannot be imported: .*no licence"):
        simulation.tell(SubmitRun(RUN, job_text(custom), 0.0))


def test_no_package_takes_the_name_of_what_is_built_in() -> None:
    """Not even one of an earlier version, which registered its own strategies, too."""
    point = EntryPoint("Local", "stratagem.no_such_module:STRATEGY", GROUP)
    assert with_plugins([point]) == BUILT_IN


def test_run_of_a_strategy_that_is_gone_fails_with_the_reason() -> None:
    simulation = start(job_text(LOCAL))
    simulation.strategies = Strategies({})
    simulation.crash()
    simulation.tell(register("a"))
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.FAILED
    assert run.reason == "the strategy Local is not installed on this coordinator"


def test_submitting_it_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="'Local' has no implementation here"):
        Simulation(Strategies({})).tell(SubmitRun(RUN, job_text(LOCAL), 0.0))


def registered(monkeypatch: pytest.MonkeyPatch, what: object) -> Strategies:
    """The strategies where a package registers this object as Theirs."""
    monkeypatch.setitem(sys.modules, "theirs", types.SimpleNamespace(strategy=what))
    return with_plugins([EntryPoint("Theirs", "theirs:strategy", GROUP)])


WRITTEN_FOR = {
    "version 1": (types.SimpleNamespace(decide=_raise), "has version 1 of the contract"),
    "a later version": (replace(local, version=3), "has version 3 of the contract"),
    "nothing of this kind": (object(), "is no strategy"),
}


@pytest.mark.parametrize("what", WRITTEN_FOR)
def test_a_strategy_of_another_version_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    strategy, why = WRITTEN_FOR[what]
    simulation = Simulation(registered(monkeypatch, strategy))
    reason = (
        f"'Theirs' (theirs:strategy) {why}; allowed is version 2: a Strategy of "
        "stratagem.coordinator.core.strategy_contract"
    )
    with pytest.raises(InvalidInputError) as caught:
        simulation.tell(SubmitRun(RUN, job_text(THEIRS), 0.0))
    assert [str(each) for each in caught.value.violations] == [f"strategy.coordinator: {reason}"]


def test_a_run_of_a_strategy_that_is_refused_now_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(registered(monkeypatch, local))
    simulation.tell(SubmitRun(RUN, job_text(THEIRS), 0.0))
    simulation.strategies = registered(monkeypatch, types.SimpleNamespace(decide=_raise))
    simulation.crash()
    simulation.tell(register("a"))
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.FAILED
    assert "has version 1 of the contract; allowed is version 2" in run.reason


def test_a_check_that_refuses_in_our_words_is_told_in_its_own() -> None:
    def check(*_: object) -> NoReturn:
        raise InvalidInputError.at("epochs", "2 is not enough for us")

    with pytest.raises(InvalidInputError, match=r"^epochs: 2 is not enough for us"):
        Simulation(with_local(replace(local, check=check))).tell(
            SubmitRun(RUN, job_text(LOCAL), 0.0)
        )


def test_a_state_that_a_strategy_notes_is_a_commit_of_its_run() -> None:
    simulation = start(job_text(LOCAL), "a")
    state = simulation.state
    noted = Noted(
        party=ROOT, kind="merged", data={}, segment=7, step=70, digest=digest("merged"),
        metrics={"test.loss": 0.5}, by_policy=True,
    )  # fmt: skip
    run = apply(state, RUN, noted, 1.0).runs[RUN]
    newest = run.commits[-1]
    assert (newest.segment, newest.step, newest.digest) == (7, 70, digest("merged"))
    assert run.metrics["test.loss"] == 0.5
    assert not run.is_reproducible, "timing has decided"
    words = apply(state, RUN, noted.model_copy(update={"digest": ""}), 1.0).runs[RUN]
    assert words.commits == state.runs[RUN].commits


def test_a_strategy_that_cannot_go_on_from_a_state_runs_inside_no_other() -> None:
    strategies = with_local(replace(local, nesting=None))
    found = JobSpec.from_json(job_text(population(), **POPULATION_SECTIONS))
    (violation,) = objections_to(found, strategies)
    assert str(violation) == (
        "strategy.options.inner: Local cannot run inside another one: it cannot go on from a "
        "state that it is given (nesting)"
    )


@pytest.mark.parametrize("cause", [Cause.UNKNOWN, Cause.CRASHED])
def test_the_failure_of_a_run_is_inside_another_one_that_of_its_party(cause: Cause) -> None:
    """And its completion is nothing: the strategy around it looks how far it has come."""
    party, spec = Party("member0"), JobSpec.from_json(job_text(LOCAL))
    failing = replace(local, decide=lambda *_: RunFailed(reason="it ends here", cause=cause))
    done = replace(local, decide=lambda *_: RunCompleted(reason="20 steps committed"))
    world = World({}, {})
    child = nested.begin(party, spec, 1, with_local(failing))
    assert nested.decide(child, world, 0.0) == PartyFailed(
        party=party, reason="it ends here", cause=cause
    )
    child = nested.begin(party, spec, 1, with_local(done))
    assert nested.decide(child, world, 0.0) is None
