"""What a strategy that fails, or is gone, does to its own run and to others: only the former."""

from typing import Any

import pytest

from stratagem.common.errors import InvalidInputError
from stratagem.coordinator.core.commands import SubmitRun
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.strategies import federated, missing, table
from stratagem.coordinator.strategies.contract import Strategy
from stratagem.coordinator.strategies.local import STRATEGY as local
from tests.core.simulation import RUN, Simulation, job, register, start
from tests.core.test_runs import FEDERATED, LOCAL

pytestmark = pytest.mark.core


class Raising:
    """Local, but for one function that raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            return self._raise
        return getattr(local, name)

    def _raise(self, *arguments: object) -> None:
        raise ZeroDivisionError("by zero")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    strategies: dict[str, object] = {"Local": local, "Federated": federated}
    monkeypatch.setattr(table, "_load", strategies.get)
    return strategies


@pytest.mark.parametrize("function", ["decide", "transition", "pending"])
def test_strategy_that_raises_fails_its_own_run_only(
    installed: dict[str, object], function: str
) -> None:
    simulation = start(job(FEDERATED), "a")
    installed["Local"] = Raising(function)
    simulation.tell(SubmitRun(type(RUN)("broken"), job(LOCAL), 0.0))
    simulation.run()
    broken = simulation.state.runs[type(RUN)("broken")]
    assert broken.ended is RunPhase.FAILED
    assert broken.reason == "the strategy raised ZeroDivisionError: by zero"
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_run_of_a_strategy_that_is_gone_fails_with_the_reason(
    installed: dict[str, object],
) -> None:
    simulation = start(job(LOCAL))
    del installed["Local"]
    simulation.crash()
    simulation.tell(register("a"))
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.FAILED
    assert run.reason == "the strategy Local is not installed on this coordinator"


def test_submitting_it_is_refused(installed: dict[str, object]) -> None:
    del installed["Local"]
    with pytest.raises(InvalidInputError, match="'Local' has no implementation here"):
        Simulation().tell(SubmitRun(RUN, job(LOCAL), 0.0))


@pytest.mark.parametrize("name", [*table.registered(), "missing"])
def test_every_strategy_has_the_whole_contract(name: str) -> None:
    strategy = missing if name == "missing" else table._load(name)
    wanted = {name for name in vars(Strategy) if not name.startswith("_")}
    assert wanted <= set(dir(strategy))
