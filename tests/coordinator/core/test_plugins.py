"""What strategies of others may do to their own run and to others: only the former."""

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
from stratagem.coordinator.app.plugins import BUILT_IN, with_plugins
from stratagem.coordinator.core import decide
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.apply import apply
from stratagem.coordinator.core.commands import ReportTrouble, SubmitRun
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.state import CoordinatorState
from stratagem.coordinator.core.strategy_calls import objections_to, parties_of, status_of
from stratagem.coordinator.core.strategy_contract import GROUP, Strategies
from stratagem.coordinator.core.world import RunPhase, World
from stratagem.coordinator.strategies import nested
from stratagem.coordinator.strategies.synchronous.local import STRATEGY as local
from tests.coordinator.core.jobs import FEDERATED, LOCAL, POPULATION_SECTIONS, job_text, population
from tests.coordinator.core.raising_strategies import _raise, raising, with_local
from tests.coordinator.core.simulation import RUN, Simulation, digest, start

pytestmark = pytest.mark.core


BROKEN = RunId("broken")
THEIRS = {"type": "Custom", "coordinator": "Theirs", "config": None}
CALLED_IN_EACH_RUN = ["init", "decide", "transition", "pending", "reject_reason"]


def custom(name: str) -> str:
    return job_text({**THEIRS, "coordinator": name})


def refused(said: str, text: str, strategies: Strategies = BUILT_IN) -> None:
    with pytest.raises(InvalidInputError, match=said):
        Simulation(strategies).tell(SubmitRun(RUN, text, 0.0))


@pytest.mark.parametrize("function", [*CALLED_IN_EACH_RUN, "own_deaths", "own_reform"])
def test_strategy_that_raises_fails_its_own_run_only(function: str) -> None:
    simulation = start(job_text(FEDERATED), "a", strategies=raising(function))
    simulation.tell(SubmitRun(BROKEN, job_text(LOCAL), 0.0))
    simulation.tell(ReportTrouble(BROKEN, f.ROOT, 1, "cut off"))
    simulation.come("a", 1)
    simulation.complete()
    broken = simulation.state.runs[BROKEN]
    assert broken.ended is RunPhase.FAILED
    assert broken.reason == "the strategy raised ZeroDivisionError: by zero"
    simulation.crash()


@pytest.mark.parametrize("function", ["own_deadline", "status", "own_parties"])
def test_one_that_cannot_say_how_it_stands_may_still_train(function: str) -> None:
    simulation = start(job_text(LOCAL), "a", strategies=raising(function))
    run = simulation.record
    said = status_of(run, simulation.agenda.world).reason
    assert (said == "the strategy raised ZeroDivisionError: by zero") is (function == "status")
    assert function != "own_parties" or parties_of(run) == {}
    simulation.complete()


def test_one_that_decides_in_a_circle_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    circling = replace(local, decide=lambda *_: f.Noted(party=f.ROOT, kind="again", data={}))
    monkeypatch.setattr(decide, "MAX_DECISIONS", 7)
    run = start(job_text(LOCAL), strategies=with_local(circling)).record
    assert run.ended is RunPhase.FAILED
    assert run.reason == "the strategy decides in a circle: 7 facts, the next one Noted"


def test_a_check_that_raises_or_refuses_in_our_words_refuses_the_job() -> None:
    def check(*_: object) -> NoReturn:
        raise InvalidInputError.at("epochs", "2 is not enough for us")

    said = "strategy: the strategy raised ZeroDivisionError"
    refused(said, job_text(LOCAL), raising("check"))
    ours = with_local(replace(local, check=check))
    refused(r"^epochs: 2 is not enough for us", job_text(LOCAL), ours)


@pytest.mark.parametrize("name", sorted(BUILT_IN.built_in))
def test_custom_cannot_name_what_is_built_in(name: str) -> None:
    """Each reads a strategy of its own type, and would fail on this one after it was accepted."""
    refused(f"strategy.coordinator: '{name}' is built in", custom(name))


def test_a_name_that_is_built_in_is_no_packages_and_keeps_no_coordinator_from_starting() -> None:
    submitted = f.RunSubmitted(job_json=custom("Federated"), wall_s=0.0)
    state = apply(CoordinatorState(BUILT_IN), RUN, submitted, 0.0)
    assert "is not installed" in status_of(state.runs[RUN], World({}, {})).reason
    point = EntryPoint("Local", "stratagem.no_such_module:STRATEGY", GROUP)
    assert with_plugins([point]) == BUILT_IN


def test_a_package_that_cannot_be_imported_or_exits_meanwhile_is_named_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("Broken", "stratagem.no_such_module:STRATEGY", GROUP)
    reason = "'Broken' cannot be imported: ModuleNotFoundError: No module named"
    refused(reason, custom("Broken"), with_plugins([point]))
    (tmp_path / "exits_at_import.py").write_text("import sys\nsys.exit('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    exits = with_plugins([EntryPoint("Exits", "exits_at_import:it", GROUP)])
    refused(r"'Exits' cannot be imported: .*no licence", custom("Exits"), exits)


def test_a_strategy_that_is_gone_fails_its_run_with_the_reason_and_is_no_more_submitted() -> None:
    simulation = start(job_text(LOCAL))
    simulation.strategies = Strategies({})
    simulation.crash(is_twin=False)
    simulation.come("a")
    assert simulation.record.ended is RunPhase.FAILED
    reason = "the strategy Local is not installed on this coordinator"
    assert simulation.record.reason == reason
    refused("'Local' has no implementation here", job_text(LOCAL), Strategies({}))


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
    simulation = start(job_text(THEIRS), strategies=registered(monkeypatch, local))
    simulation.strategies = registered(monkeypatch, types.SimpleNamespace(decide=_raise))
    simulation.crash(is_twin=False)
    simulation.come("a")
    assert simulation.record.ended is RunPhase.FAILED
    assert "has version 1 of the contract; allowed is version 2" in simulation.record.reason


def test_a_state_that_a_strategy_notes_is_a_commit_of_its_run() -> None:
    simulation = start(job_text(LOCAL), "a")
    state = simulation.state
    noted = f.Noted(
        party=f.ROOT, kind="merged", data={}, segment=7, step=70, digest=digest("merged"),
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
    failing = replace(local, decide=lambda *_: f.RunFailed(reason="it ends here", cause=cause))
    done = replace(local, decide=lambda *_: f.RunCompleted(reason="20 steps committed"))
    world = World({}, {})
    child = nested.begin(party, spec, 1, with_local(failing))
    assert nested.decide(child, world, 0.0) == f.PartyFailed(
        party=party, reason="it ends here", cause=cause
    )
    child = nested.begin(party, spec, 1, with_local(done))
    assert nested.decide(child, world, 0.0) is None
