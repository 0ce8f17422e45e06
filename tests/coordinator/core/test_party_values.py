"""The run value of a party, however far below the run it is."""

from dataclasses import replace

import pytest

from stratagem.common.base.ids import Party
from stratagem.coordinator.core.facts import ROOT
from stratagem.coordinator.core.state_machine.strategy_boundary import value_of
from stratagem.coordinator.strategies.federated.federated_run import FederatedRun
from stratagem.coordinator.strategies.population.population_run import PopulationRun
from tests.coordinator.core.jobs import FEDERATED, POPULATION_SECTIONS, job_text, population
from tests.coordinator.core.raising_strategies import _raise
from tests.coordinator.core.simulation import RUN, start

pytestmark = pytest.mark.core


def test_each_party_has_the_value_of_its_own_strategy() -> None:
    inner = {**FEDERATED, "rounds": 5}
    evaluation = {"metrics": ["accuracy"], "best": "loss"}
    text = job_text(
        population(size=12, inner=inner), **POPULATION_SECTIONS | {"evaluation": evaluation}
    )
    run = start(text, "a", "b").state.runs[RUN]
    assert isinstance(value_of(run, ROOT), PopulationRun)
    for name in ("member1", "member11"):
        value = value_of(run, Party(name))
        assert isinstance(value, FederatedRun)
        assert value.party == name
        assert value_of(run, Party(f"{name}/client2")) is value
    broken = replace(run, strategy=replace(run.strategy, children=_raise))
    assert value_of(broken, Party("member1")) is None
