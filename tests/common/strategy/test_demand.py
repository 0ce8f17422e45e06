"""How many workers a strategy has work for."""

from typing import Any

import pytest

from stratagem.common.strategy import parse_strategy
from stratagem.common.strategy.strategies import workers_used
from tests.common.strategy.documents import DATA_PARALLEL, FEDERATED, POPULATION

pytestmark = pytest.mark.core

PAIR = DATA_PARALLEL
STAGES = {
    "type": "ModelParallel",
    "partitions": [
        {"id": str(number), "node_ids": [f"n{number}"], "target": {"Tag": "t"}}
        for number in range(3)
    ],
    "communication": {"protocol": "Direct"},
}
HALF = {"client_selection": {"method": "Random", "fraction": 0.5}}
SILOS = FEDERATED | {"num_clients": 7} | HALF
MEMBERS = POPULATION | {"population_size": 5}


def inside(outer: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    return outer | {"options": {"inner": inner}}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"type": "Local"}, 1),
        ({"type": "Custom", "coordinator": "SuccessiveHalving", "config": {}}, 1),
        (PAIR, 2),
        (STAGES, 3),
        (SILOS, 3),
        (SILOS | {"client_selection": {"method": "All"}}, 7),
        (MEMBERS, 5),
        (inside(PAIR, STAGES), 6),
        (inside(SILOS, PAIR), 6),
        (inside(MEMBERS, inside(PAIR, STAGES)), 30),
    ],
)
def test_each_strategy_says_how_many(document: dict[str, Any], expected: int) -> None:
    assert workers_used(parse_strategy(document)) == expected
