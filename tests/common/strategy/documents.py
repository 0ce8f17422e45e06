"""The documents of strategies, as users write them, and what is wrong with one."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.strategy import parse_strategy

DATA_PARALLEL: dict[str, Any] = {
    "type": "DataParallel",
    "num_replicas": 2,
    "aggregation": {"method": "AllReduce"},
}
FEDERATED: dict[str, Any] = {
    "type": "Federated",
    "num_clients": 4,
    "rounds": 3,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "All"},
}
POPULATION: dict[str, Any] = {
    "type": "PopulationBased",
    "population_size": 4,
    "generations": 3,
    "exploit": {"method": "Truncation", "fraction": 0.2},
    "explore": {"method": "Perturbation", "factor": 0.2},
}


def wrong(source: object) -> list[str]:
    with pytest.raises(InvalidInputError) as caught:
        parse_strategy(source)
    return [str(each) for each in caught.value.violations]
