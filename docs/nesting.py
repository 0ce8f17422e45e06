"""The table of which strategy runs inside which, asked of the code that takes or refuses jobs."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from docs.tables import table
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.strategy import describe, parse_strategy
from stratagem.coordinator.core.state_machine.strategy_boundary import objections_to
from stratagem.coordinator.runtime.plugins import BUILT_IN

ALL_REDUCE: Final = {
    "type": "DataParallel",
    "num_replicas": 2,
    "aggregation": {"method": "AllReduce"},
}
STAGES: Final = {
    "type": "ModelParallel",
    "partitions": [
        {"node_ids": ["0"], "target": {"Tag": "stage"}},
        {"node_ids": ["1"], "target": {"Tag": "stage"}},
    ],
}
FEDERATED: Final = {
    "type": "Federated",
    "num_clients": 2,
    "rounds": 1,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "All"},
}
POPULATION: Final = {
    "type": "PopulationBased",
    "population_size": 2,
    "generations": 1,
    "exploit": {"method": "Truncation", "fraction": 0.5},
    "explore": {"method": "Perturbation", "factor": 0.2},
}
OUTER: Final[Mapping[str, dict[str, Any]]] = {
    "DataParallel/AllReduce": ALL_REDUCE,
    "DataParallel/ParameterServer": ALL_REDUCE | {"aggregation": {"method": "ParameterServer"}},
    "DataParallel/Decentralized": ALL_REDUCE
    | {"aggregation": {"method": "Decentralized", "topology": "ring"}},
    "Federated": FEDERATED,
    "PopulationBased": POPULATION,
}
INNER: Final[Mapping[str, dict[str, Any]]] = {
    "Local": {"type": "Local"},
    **{name: each for name, each in OUTER.items() if name.startswith("DataParallel")},
    "ModelParallel/Direct": STAGES | {"communication": {"protocol": "Direct"}},
    "ModelParallel/DataStore": STAGES | {"communication": {"protocol": "DataStore"}},
    "ModelParallel/Pipeline": STAGES
    | {"communication": {"protocol": "Pipeline", "micro_batch_size": 4}},
    "Federated": FEDERATED,
    "PopulationBased": POPULATION,
}


def why_not(outer: str, inner: str) -> str:
    """Return why a coordinator refuses one strategy inside another; empty: it runs it."""
    strategy = OUTER[outer] | {"options": {"inner": INNER[inner]}}
    document: dict[str, Any] = {
        "name": "nested",
        "model": {"entrypoint": "task:model"},
        "data": {"entrypoint": "task:data"},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "batch_size": 8,
        "seed": 0,
        "strategy": strategy,
    }
    if outer.startswith("DataParallel"):
        document["epochs"] = 1
    if outer == "PopulationBased":
        document |= {
            "steps_per_generation": 1,
            "search_space": {"optimizer.lr": {"low": 0.01, "high": 1.0}},
            "evaluation": {"split": "test", "best": "loss", "mode": "min"},
        }
    try:
        violations = objections_to(JobSpec.parse(document), BUILT_IN)
    except InvalidInputError as error:
        violations = list(error.violations)
    return "; ".join(map(str, violations))


def nesting_table() -> str:
    """Return a row for each strategy inside, a column for each around it."""
    reasons: list[str] = []
    rows = []
    for inner, strategy in INNER.items():
        own = describe(parse_strategy(strategy))
        cells = []
        for outer in OUTER:
            reason = why_not(outer, inner).replace(own, "this strategy")
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"no ({reasons.index(reason) + 1})" if reason else "yes")
        rows.append((f"`{inner}`", *cells))
    notes = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return f"{table(('inside', *(f'`{each}`' for each in OUTER)), rows)}\n\n{notes}"


RENDERED: Final[Mapping[str, Callable[[], str]]] = {"nesting": nesting_table}
