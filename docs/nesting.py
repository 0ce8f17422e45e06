"""The table of which strategy runs inside which, asked of the code that takes or refuses jobs."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import yaml

from docs.code_map import ROOT
from docs.tables import table
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.strategy import describe, parse_strategy
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core.strategy_calls import objections_to

ALL_REDUCE: Final = {
    "type": "DataParallel",
    "num_replicas": 2,
    "aggregation": {"method": "AllReduce"},
}
LAYER: Final = {
    "id": "a",
    "module": "Linear",
    "kwargs": {"in_features": 2, "out_features": 2},
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
TO_EXAMPLES: Final = "../../../examples"
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
    "ModelParallel": {
        "type": "ModelParallel",
        "partitions": [{"node_ids": [name], "target": {"Tag": "own"}} for name in "01"],
        "communication": {"protocol": "Direct"},
    },
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


def _around(outer: str, inner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a job in which one strategy stands inside another."""
    model: dict[str, Any] = {"entrypoint": "task:model"}
    if outer != "ModelParallel":
        return {"model": model, "strategy": OUTER[outer] | {"options": {"inner": inner}}}
    stages = [
        {"id": name, "graph": {"nodes": [LAYER], "training_strategy": inner}} for name in "01"
    ]
    graph = {"subgraphs": stages, "edges": [{"source": "0", "target": "1"}]}
    return {"model": {"graph": graph}, "strategy": OUTER[outer]}


def why_not(outer: str, inner: str) -> str:
    """Return why a coordinator refuses one strategy inside another; empty: it runs it."""
    document: dict[str, Any] = {
        "name": "nested",
        "data": {"entrypoint": "task:data"},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "batch_size": 8,
        "seed": 0,
        **_around(outer, INNER[inner]),
    }
    if outer.startswith(("DataParallel", "ModelParallel")):
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


def examples() -> dict[tuple[str, str], str]:
    """Return the first example of each nesting, by the strategies around and inside.

    It stands for that nesting with every protocol of ModelParallel, and for stages with every way
    to sum, each of which is one word of the file.
    """
    found: dict[tuple[str, str], str] = {}
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        document = yaml.safe_load(path.read_text())
        outer, graph = document.get("strategy", {}), document["model"].get("graph", {})
        own = [sub["graph"].get("training_strategy") for sub in graph.get("subgraphs", [])]
        inner = outer.get("options", {}).get("inner") or (own[0] if own else None)
        if inner is not None:
            found.setdefault((_kind(outer), _kind(inner)), path.name)
            if outer["type"] == "ModelParallel":
                found.setdefault((_kind(outer), inner["type"]), path.name)
    return found


def _kind(strategy: Mapping[str, Any]) -> str:
    """Return a strategy's name in the table; of ModelParallel all protocols have one."""
    kind: str = strategy["type"]
    return f"{kind}/{strategy['aggregation']['method']}" if kind == "DataParallel" else kind


def nesting_table() -> str:
    """Return a row for each strategy inside, a column for each around it."""
    shown = examples()
    reasons: list[str] = []
    rows = []
    for inner, strategy in INNER.items():
        own = describe(parse_strategy(strategy))
        cells = []
        for outer in OUTER:
            reason = why_not(outer, inner).replace(own, "this strategy")
            example = shown.get((outer, _kind(strategy))) or shown.get((outer, strategy["type"]))
            taken = f"[yes]({TO_EXAMPLES}/{example})" if example else "yes"
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"no ({reasons.index(reason) + 1})" if reason else taken)
        rows.append((f"`{inner}`", *cells))
    notes = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return f"{table(('inside', *(f'`{each}`' for each in OUTER)), rows)}\n\n{notes}"


RENDERED: Final[Mapping[str, Callable[[], str]]] = {"nesting": nesting_table}
