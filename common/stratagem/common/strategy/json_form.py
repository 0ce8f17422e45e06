"""The JSON form of a strategy, shared with the Rust programs that speak it.

The shapes below are the whole grammar: for each class the fields in the order in which they are
written. Variants are objects with their name under a tag key ("type", "method", "protocol"),
except a RemoteTarget, which is an object with one key. Our extras stand under `options`.
Does not judge whether a strategy can be carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.schema.json_forms import (
    ANY_JSON,
    FLAG,
    REAL,
    TEXT,
    TEXTS,
    UNSIGNED,
    JsonForm,
    ObjectForm,
    list_of,
    plain,
    read_object,
    read_real,
    read_text,
    tagged,
)
from stratagem.common.schema.json_text import JSON, dump_json, join, load_json
from stratagem.common.strategy import choices, kinds
from stratagem.common.strategy.kinds import Strategy


def parse_strategy(source: object, path: str = "strategy") -> Strategy:
    """A strategy from its JSON text or from the parsed object; `path` names it in errors."""
    value = load_json(source, path) if isinstance(source, str) else source
    strategy: Strategy = _STRATEGY.read(value, path)
    return strategy


def dump_strategy(strategy: Strategy) -> dict[str, JSON]:
    """The JSON object, tag first, then the fields in order; without extras the shared form."""
    written = _STRATEGY.write(strategy)
    assert isinstance(written, dict)
    return written


def dumps_strategy(strategy: Strategy) -> str:
    """The compact JSON text of a strategy."""
    return dump_json(dump_strategy(strategy))


REFUSE: Final = "refuse"


def _quorum(value: object, path: str) -> int | float | None:
    return value if value is None or type(value) is int else read_real(value, path)


def _read_late_updates(value: object, path: str) -> choices.Discount | None:
    if value == REFUSE:
        return None
    if not isinstance(value, dict) or value.keys() != {"discount"}:
        text = f"must be {REFUSE!r} or {{discount: d}} with d in (0, 1]; is {value!r}"
        raise InvalidInputError.at(path, text)
    discount = read_real(value["discount"], join(path, "discount"))
    try:
        return choices.Discount(discount)
    except InvalidInputError as error:
        message = error.violations[0].message
        raise InvalidInputError.at(join(path, "discount"), message) from None


def _write_late_updates(value: choices.Discount | None) -> JSON:
    return REFUSE if value is None else {"discount": value.discount}


def _optional(form: JsonForm) -> JsonForm:
    """Return the form that also allows null."""
    return JsonForm(
        lambda value, path: None if value is None else form.read(value, path),
        lambda value: None if value is None else form.write(value),
    )


def _read_target(value: object, path: str) -> choices.RemoteTarget:
    entries = read_object(value, path)
    if len(entries) != 1 or not entries.keys() <= _TARGETS.keys():
        keys = ", ".join(str(key) for key in entries) or "none"
        raise InvalidInputError.at(path, f"needs exactly one key, Tag or WorkerId; has {keys}")
    ((key, name),) = entries.items()
    try:
        return _TARGETS[key](read_text(name, join(path, key)))
    except InvalidInputError as error:
        # the one value of the variant has no name of its own in the JSON form
        raise InvalidInputError.at(join(path, key), error.violations[0].message) from None


def _write_target(target: choices.RemoteTarget) -> JSON:
    match target:
        case choices.Tag(tag):
            return {"Tag": tag}
        case choices.WorkerIdTarget(worker_id):
            return {"WorkerId": worker_id}


_TARGETS: Final[Mapping[str, Callable[[Any], choices.RemoteTarget]]] = {
    "Tag": choices.Tag,
    "WorkerId": choices.WorkerIdTarget,
}
TARGET: Final = JsonForm(_read_target, _write_target)
# A strategy may hold another one: the form refers to itself.
_INNER: Final = JsonForm(
    lambda value, path: None if value is None else _STRATEGY.read(value, path),
    lambda value: None if value is None else _STRATEGY.write(value),
)
_GRADIENT_AGGREGATION: Final = tagged(
    "method",
    ObjectForm(choices.AllReduce),
    ObjectForm(choices.ParameterServer),
    ObjectForm(choices.Decentralized, {"topology": TEXT}),
)
_PARTITION: Final = plain(ObjectForm(choices.Partition, {"node_ids": TEXTS, "target": TARGET}))
_PROTOCOL: Final = tagged(
    "protocol",
    ObjectForm(choices.DataStore),
    ObjectForm(choices.Direct),
    ObjectForm(choices.Pipeline, {"micro_batch_size": UNSIGNED}),
)
_FEDERATED_AGGREGATION: Final = tagged(
    "method",
    ObjectForm(choices.FedAvg),
    ObjectForm(choices.FedProx, {"mu": REAL}),
    ObjectForm(choices.FedYogi, {"beta1": REAL, "beta2": REAL, "tau": REAL}),
)
_SELECTION: Final = tagged(
    "method",
    ObjectForm(choices.All),
    ObjectForm(choices.Random, {"fraction": REAL}),
    ObjectForm(choices.ByCapability, {"required_tags": TEXTS}),
)
_EXPLOIT: Final = tagged(
    "method",
    ObjectForm(choices.Truncation, {"fraction": REAL}),
    ObjectForm(choices.Binary, {"threshold": REAL}),
)
_EXPLORE: Final = tagged(
    "method", ObjectForm(choices.Perturbation, {"factor": REAL}), ObjectForm(choices.Resample)
)
_DATA_PARALLEL_OPTIONS: Final = ObjectForm(
    kinds.DataParallelOptions,
    {
        "min_replicas": UNSIGNED,
        "all_reduce": TEXT,
        "inner": _INNER,
        "consensus_every": _optional(UNSIGNED),
    },
    is_extras=True,
)
_MODEL_PARALLEL_OPTIONS: Final = ObjectForm(
    kinds.ModelParallelOptions, {"schedule": TEXT}, is_extras=True
)
_SERVER_OPTIMIZER: Final = tagged(
    "name",
    ObjectForm(
        choices.FedAdam,
        {"learning_rate": REAL, "beta1": REAL, "beta2": REAL, "tau": REAL},
        is_extras=True,
    ),
    ObjectForm(choices.FedAdagrad, {"learning_rate": REAL, "tau": REAL}, is_extras=True),
    ObjectForm(choices.FedAvgM, {"learning_rate": REAL, "momentum": REAL}, is_extras=True),
    spelling=str.lower,
)
_FEDERATED_OPTIONS: Final = ObjectForm(
    kinds.FederatedOptions,
    {
        "local_epochs": UNSIGNED,
        "quorum": JsonForm(_quorum, lambda value: value),
        "round_deadline_s": _optional(REAL),
        "server_learning_rate": REAL,
        "server_optimizer": _optional(_SERVER_OPTIMIZER),
        "over_select": UNSIGNED,
        "late_updates": JsonForm(_read_late_updates, _write_late_updates),
        "max_staleness": UNSIGNED,
        "inner": _INNER,
        "on_client_error": TEXT,
        "on_missing_quorum": TEXT,
    },
    is_extras=True,
)
_POPULATION_OPTIONS: Final = ObjectForm(
    kinds.PopulationOptions, {"inner": _INNER, "asynchronous": FLAG}, is_extras=True
)
_STRATEGY: Final[JsonForm] = tagged(
    "type",
    ObjectForm(kinds.Local),
    ObjectForm(
        kinds.DataParallel,
        {"num_replicas": UNSIGNED, "aggregation": _GRADIENT_AGGREGATION},
        extras=_DATA_PARALLEL_OPTIONS,
    ),
    ObjectForm(
        kinds.ModelParallel,
        {"partitions": list_of(_PARTITION), "communication": _PROTOCOL},
        extras=_MODEL_PARALLEL_OPTIONS,
    ),
    ObjectForm(
        kinds.Federated,
        {
            "num_clients": UNSIGNED,
            "rounds": UNSIGNED,
            "aggregation": _FEDERATED_AGGREGATION,
            "client_selection": _SELECTION,
        },
        extras=_FEDERATED_OPTIONS,
    ),
    ObjectForm(
        kinds.PopulationBased,
        {
            "population_size": UNSIGNED,
            "generations": UNSIGNED,
            "exploit": _EXPLOIT,
            "explore": _EXPLORE,
        },
        extras=_POPULATION_OPTIONS,
    ),
    ObjectForm(kinds.Custom, {"coordinator": TEXT, "config": ANY_JSON}),
    extras_key="options",
)
