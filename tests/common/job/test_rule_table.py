"""The tables of rules: each row is of fields that exist, can be violated by a job, and is told; no
two say the same."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.job import Every, JobSpec
from stratagem.common.job.rules import (
    EVALUATING,
    EVERY_JOB,
    SUBMITTED,
    TRAINING,
    check_submitted,
)
from stratagem.common.schema.table import Rules, Table, Under, refusal_of
from stratagem.common.strategy import (
    DataParallel,
    DataParallelOptions,
    Federated,
    FederatedOptions,
    ModelParallel,
)
from stratagem.common.strategy.rules import (
    DATA_PARALLEL,
    FEDERATED,
    FEDERATED_OPTIONS,
    MODEL_PARALLEL,
)
from tests.common.job.documents import MINIMAL
from tests.common.strategy.documents import DATA_PARALLEL as REPLICAS
from tests.common.strategy.documents import FEDERATED as FEDERATION
from tests.common.strategy.documents import POPULATION

COMPARED = ("<=", ">", "!=")
PLACE = re.compile(r"\{([a-z_][\w.\[\]]*)(?:!r)?(?::g)?\}")
OPTIMIZER = {"name": "sgd", "lr": 0.1}
STAGES = {
    "type": "ModelParallel",
    "partitions": [{"node_ids": ["a"], "target": {"Tag": "x"}}],
    "communication": {"protocol": "Direct"},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "Local": {"type": "Local"},
    "DataParallel": REPLICAS,
    "ModelParallel": STAGES,
    "Federated": FEDERATION,
    "PopulationBased": POPULATION,
    "Custom": {"type": "Custom", "coordinator": "x", "config": {}},
}
METHODS: dict[str, dict[str, Any]] = {
    "Decentralized": {"topology": "ring"},
    "FedProx": {"mu": 0.1},
    "FedYogi": {"beta1": 0.9, "beta2": 0.99, "tau": 0.1},
    "ByCapability": {"required_tags": []},
}
RANDOM = {"method": "Random", "fraction": 0.5}
TURN = {"name": "a", "params": ["*"], "step": "m:f", "optimizer": OPTIMIZER}
PRIVACY = {"clip": {"norm": 1.0}, "target": {"delta": 1e-5, "epsilon": 8.0}}
SAID: dict[str, Any] = {
    "accumulation": {},
    "accumulation.micro_batch_size": 8,
    "accumulation.steps": 2,
    "batch_size": 32,
    "callbacks": "m:f",
    "checkpoint.every": "2 steps",
    "compression": {"codec": "int8"},
    "compression.consensus_step_size": 0.5,
    "data.collate": "m:f",
    "data.is_stream": ("data.streams", 2),
    "data.order": "sequential",
    "data.worker_local": ("data", {"worker_local": "sites"}),
    "epochs": 2,
    "evaluation": {},
    "evaluation.best": "loss",
    "evaluation.every": "3 steps",
    "evaluation.stop": {"patience": 2, "metric": "loss"},
    "execution": {},
    "execution.gradient": {"Checkpointed": 2},
    "checkpoint": {},
    "privacy.clip": PRIVACY["clip"],
    "strategy.options": {},
    "execution.mode": "Lazy",
    "execution.parallelism": "Automatic",
    "hyperparameter_schedule": {"settings": [{"from_step": 0, "seed": 1, "params": {}}]},
    "initial.resume": ("initial", {"digest": "ab" * 32, "resume": True, "step": 100}),
    "loss": "mse",
    "model.graph": ("model", {"graph": {"nodes": [{"id": "a", "module": "Linear"}], "edges": []}}),
    "num_steps": ("steps", 10),
    "optimizer": OPTIMIZER,
    "optimizer.clip_norm": 1.0,
    "optimizer.groups[].lr": ("optimizer.groups", [{"name": "a", "match": ["*"], "lr": 0.2}]),
    "optimizer.groups[].optimizer": (
        "optimizer.groups",
        [{"name": "a", "match": ["*"], "optimizer": OPTIMIZER}],
    ),
    "optimizer.kwargs": {},
    "optimizer.plateau": ("optimizer.schedule", {"name": "plateau", "metric": "loss"}),
    "optimizer.schedule": "cosine",
    "optimizer.schedule.warmup_steps": 3,
    "optimizer.schedule.entrypoint": ("optimizer.schedule", "m:f"),
    "partition": {"method": "contiguous"},
    "partition.client": ("partition", {"method": "contiguous", "client": 0, "num_clients": 2}),
    "phases": {},
    "predict": "m:f",
    "privacy": PRIVACY,
    "privacy.clip.adaptive": {},
    "search_space": {"optimizer.lr": {"low": 0.1, "high": 1.0}},
    "step": "m:f",
    "steps": 10,
    "steps_per_generation": 3,
    "strategy.aggregation.mu": ("strategy.aggregation", {"method": "FedProx", "mu": 0.1}),
    "strategy.client_selection": {"method": "All"},
    "strategy.options.all_reduce": "ring",
    "strategy.options.consensus_every": 2,
    "strategy.options.control": "scaffold",
    "strategy.options.ditto": {"lambda": 0.1},
    "strategy.options.fragments": 2,
    "strategy.options.inner": REPLICAS,
    "strategy.options.late_updates": (
        "strategy",
        {
            "client_selection": RANDOM,
            "options": {"late_updates": {"discount": 0.5}, "over_select": 1},
        },
    ),
    "strategy.options.local_epochs": 2,
    "strategy.options.local_steps": 4,
    "strategy.options.max_staleness": 2,
    "strategy.options.mirror": 0,
    "strategy.options.mix": 0.1,
    "strategy.options.normalize": "fednova",
    "strategy.options.on_missing_quorum": "wait",
    "strategy.options.open_roster": ("strategy.options.roster", {"open": True}),
    "strategy.options.outer": {"name": "mean"},
    "strategy.options.outer_bits": ("strategy.options", {"outer_bits": 8, "local_steps": 2}),
    "strategy.options.over_select": (
        "strategy",
        {"client_selection": RANDOM, "options": {"over_select": 1}},
    ),
    "strategy.options.overlap_steps": 1,
    "strategy.options.partition_state": "optimizer",
    "strategy.options.personal": ["a.*"],
    "strategy.options.q": 1.0,
    "strategy.options.regions": {"a": [0, 1], "b": [2, 3]},
    "strategy.options.robust": {"name": "median"},
    "strategy.options.round_deadline_s": 10.0,
    "strategy.options.schedule": "gpipe",
    "strategy.options.secure_aggregation": {},
    "strategy.options.server_learning_rate": 0.5,
    "strategy.options.server_optimizer": {"name": "fedadam"},
    "strategy.options.strikes": {"limit": 2},
    "strategy.options.upload_every": 3,
    "turns": [TURN, {**TURN, "name": "b"}],
    "turns[].optimizer.plateau": (
        "turns",
        [{**TURN, "optimizer": {**OPTIMIZER, "schedule": "plateau"}}],
    ),
    "turns[].optimizer.schedule": (
        "turns",
        [{**TURN, "optimizer": {**OPTIMIZER, "schedule": "cosine"}}],
    ),
    "turns[].optimizer.schedule.entrypoint": (
        "turns",
        [{**TURN, "optimizer": {**OPTIMIZER, "schedule": "m:f"}}],
    ),
    "turns[].optimizer.schedule.warmup_steps": (
        "turns",
        [{**TURN, "optimizer": {**OPTIMIZER, "schedule": {"name": "plateau", "warmup_steps": 2}}}],
    ),
    "verification": {"sample": 0.5},
    "weight_average": {},
}
"""A value that says something at each path; in another place, as (path, value)."""
FITTING: dict[str, Any] = {
    "no strategy.options.inner.type is Local": ("strategy.options.inner", STAGES),
    "compression.codec is not none": ("compression", {"codec": "int8"}),
    "loss.name is not bce_with_logits|cross_entropy|l1|mse|nll": ("loss", "token_cross_entropy"),
    **{
        f"optimizer.groups[].kwargs.{key}": (
            "optimizer.groups",
            [{"name": "a", "match": ["*"], key: 0.5}],
        )
        for key in ("momentum", "nesterov", "dampening", "maximize")
    },
    **{
        f"strategy.options.inner.options.{key}": (
            "strategy.options.inner",
            {**FEDERATION, "options": {key: SAID[f"strategy.options.{key}"]}},
        )
        for key in ("secure_aggregation", "personal", "ditto", "control")
    },
    "data.readers is not 0": ("data.readers", 2),
    "evaluation.metrics[] is not loss|perplexity": ("evaluation.metrics", ["accuracy"]),
    "execution.gradient is Accumulated": ("execution.gradient", {"Accumulated": 2}),
    "execution.parallelism is ModelParallel|PipelineParallel": (
        "execution.parallelism",
        {"ModelParallel": 2},
    ),
    "evaluation.every.unit is epoch": ("evaluation.every", "2 epochs"),
    "checkpoint.every.unit is epoch": ("checkpoint.every", "2 epochs"),
    "hyperparameter_schedule.last_step > num_steps": (
        "",
        {
            "hyperparameter_schedule": {**SAID["hyperparameter_schedule"], "last_step": 99},
            "steps": 9,
        },
    ),
    "strategy.options.inner.type is not Local|Federated": ("strategy.options.inner", REPLICAS),
    "accumulation.micro_batch_size > batch_size": ("accumulation", {"micro_batch_size": 999}),
    "accumulation.steps > batch_size": ("accumulation", {"steps": 999}),
    "execution.accumulation_steps > batch_size": ("execution.gradient", {"Accumulated": 999}),
    "strategy.num_replicas > batch_size": ("strategy.num_replicas", 999),
    "strategy.rounds <= initial.step": ("strategy.rounds", 3),
    "steps <= initial.step": ("steps", 10),
    "strategy.options.min_replicas > strategy.num_replicas": ("strategy.options.min_replicas", 9),
    "strategy.options.quorum > strategy.num_clients": ("strategy.options.quorum", 9),
    "strategy.options.open_roster.min_clients > strategy.num_clients": (
        "strategy.options.roster",
        {"open": True, "min_clients": 9},
    ),
    "strategy.options.quorum > strategy.options.open_roster.min_clients": (
        "strategy.options",
        {"quorum": 4, "roster": {"open": True, "min_clients": 3}},
    ),
    "strategy.aggregation.mu > 0": SAID["strategy.aggregation.mu"],
    "strategy.options.inner.rounds != steps_per_generation": (
        "",
        {
            "strategy": {**POPULATION, "options": {"inner": FEDERATION}},
            "steps_per_generation": 50,
        },
    ),
    "strategy.options.inner.aggregation.method is not FedAvg": (
        "strategy.options.inner",
        {**FEDERATION, "aggregation": {"method": "FedYogi", **METHODS["FedYogi"]}},
    ),
}


TABLES: dict[str, tuple[Any, str, tuple[str, ...], Table]] = {
    "every job": (JobSpec, "", (), EVERY_JOB),
    "evaluating": (JobSpec, "", ("execution.gradient is None",), EVALUATING),
    "training": (JobSpec, "", (), TRAINING),
    "submitted": (JobSpec, "", (), SUBMITTED),
    "data parallel": (DataParallel, "strategy.", ("strategy.type is DataParallel",), DATA_PARALLEL),
    "stages": (ModelParallel, "strategy.", ("strategy.type is ModelParallel",), MODEL_PARALLEL),
    "federated": (Federated, "strategy.", ("strategy.type is Federated",), FEDERATED),
    "options": (
        FederatedOptions,
        "strategy.options.",
        ("strategy.type is Federated",),
        FEDERATED_OPTIONS,
    ),
}
OTHERS: dict[str, Any] = {
    "strategy.aggregation.method is AllReduce": (
        "strategy.aggregation",
        {"method": "ParameterServer"},
    ),
    "strategy.aggregation.method is FedAvg": SAID["strategy.aggregation.mu"],
    "strategy.client_selection.method is Random": ("strategy.client_selection", {"method": "All"}),
    "strategy.type is Local": ("strategy", REPLICAS),
    "optimizer.label is sgd": ("optimizer.name", "adam"),
}
"""What else may be where a value must not be."""
Written = tuple[Any, str, list[str], str, str]
"""The class that a row is of, the path of its values in a job, the conditions, the field, the
sentence."""


def rows(name: str) -> Iterator[Written]:
    cls, prefix, before, table = TABLES[name]
    yield from rows_in(table, cls, prefix, before)


def rows_in(table: Table, cls: Any, prefix: str, before: tuple[str, ...]) -> Iterator[Written]:
    for each in table:
        if isinstance(each, Under):
            yield from rows_in(each.table, cls, prefix, (*before, *split(each.when, prefix)))
        elif isinstance(each, Rules):
            for case, text in each.rows.items():
                own = split(case.partition(": ")[2] if case.startswith("at ") else case, prefix)
                field = prefix + refusal_of(case, "").field
                says = each.says.replace("{}", text)
                yield cls, prefix, [*before, *split(each.when, prefix), *own], field, says


def split(text: str, prefix: str) -> list[str]:
    """The conditions, with the paths that they have in a job."""
    found = []
    for each in re.split(" when | and ", text) if text else ():
        path, *rest = each.removeprefix("no ").split(" ")
        if rest and rest[0] in COMPARED and not rest[1].isdecimal():
            rest[1] = prefix + rest[1]
        found.append(" ".join(["no"] * each.startswith("no ") + [prefix + path, *rest]))
    return found


ALL = [(name, *row) for name in TABLES for row in rows(name)]


def test_no_two_rows_say_the_same() -> None:
    said = Counter((name, field, frozenset(when)) for name, _, _, when, field, _ in ALL)
    assert [each for each, count in said.items() if count > 1] == []


# ---- Paths ----


def classes_in(annotation: Any) -> Iterator[Any]:
    if hasattr(annotation, "__pydantic_fields__") or annotation is Every:
        yield annotation
    for part in get_args(annotation):
        yield from classes_in(part)


def exists(kinds: set[Any], path: str) -> bool:
    """Whether one of the classes has what a path names; keys of mappings are the user's."""
    step, _, further = path.partition(".")
    name = step.removesuffix("[]")
    for kind in kinds:
        info = getattr(kind, "__pydantic_fields__", {}).get(name)
        own = getattr(kind, name, None)
        if info is None and kind is not Every and not isinstance(own, property):
            continue
        found: Any = info.annotation if info else Any
        if isinstance(own, property):
            found = get_type_hints(own.fget).get("return")
        if not further or name == "kwargs" or found is Any:
            return True
        if exists(set(classes_in(found)), further):
            return True
    return False


@pytest.mark.parametrize("name", TABLES)
def test_rows_ask_for_what_there_is(name: str) -> None:
    _, prefix, _, _ = TABLES[name]
    for _, _, when, _, says in rows(name):
        asked = [each.removeprefix("no ").split(" ") for each in when]
        paths = [path for path, *_ in asked]
        paths += [rest[1] for _, *rest in asked if rest and rest[0] in COMPARED]
        paths += [prefix + path for path in PLACE.findall(says)]
        for path in paths:
            assert path.isdecimal() or exists({JobSpec}, path), (path, when)


# ---- Jobs ----


def violating(when: list[str]) -> dict[str, Any]:
    """A document of which conditions hold."""
    document = copy.deepcopy(MINIMAL)
    for condition in sorted(when, key=in_turn):
        path, *rest = condition.removeprefix("no ").split(" ")
        if condition in FITTING:
            put(document, *FITTING[condition])
        elif condition.startswith("no "):
            take_away(document, condition.removeprefix("no "), path, is_said=not rest)
        elif not rest:
            if at(document, path) is None:
                put(document, *said(path))
        elif path.endswith((".type", ".method")):
            holder, _, key = path.rpartition(".")
            choose(document, holder, key, rest[-1].split("|"))
        else:
            put(document, path, {"false": False}.get(rest[-1], rest[-1].split("|")[0]))
    return document


def in_turn(condition: str) -> tuple[bool, bool, int]:
    """Strategies and methods first, what is not there last, sections before their fields."""
    is_choice = ".type is " in condition or ".method is " in condition
    return condition.startswith("no "), not is_choice, condition.count(".")


def take_away(document: dict[str, Any], condition: str, path: str, *, is_said: bool) -> None:
    before, _, last = path.rpartition(".")
    if is_said:
        (at(document, before) or {}).pop(last, None)
    elif condition in OTHERS and (at(document, before) or path == "strategy.type"):
        put(document, *OTHERS[condition])


def choose(document: dict[str, Any], holder: str, key: str, choices: list[str]) -> None:
    """Have a strategy, or a method, that is one of the choices."""
    value = choices[0]
    if "strategy" not in document and holder != "strategy":
        is_of_clients = value.startswith("Fed") or "client" in holder
        put(document, "strategy", FEDERATION if is_of_clients else REPLICAS)
    if (at(document, holder) or {}).get(key) not in choices:
        whole = {"method": value, **METHODS.get(value, {})}
        put(document, holder, STRATEGIES[value] if key == "type" else whole)


def said(path: str) -> tuple[str, Any]:
    value = SAID.get(path, True)
    return value if isinstance(value, tuple) else (path, value)


def at(document: Any, path: str) -> Any:
    for key in path.split(".") if path else ():
        document = document.get(key) if isinstance(document, dict) else None
    return document


def put(document: dict[str, Any], path: str, value: Any) -> None:
    """Set a value, and what must be around it; to part of a strategy, options are added."""
    parts = path.split(".") if path else []
    if parts[:1] == ["strategy"] and len(parts) + isinstance(value, dict) > 1:
        names = {*parts, *(value if parts[-1] in ("strategy", "options") else ())}
        is_of_replicas = names & {*DataParallel.__pydantic_fields__, "local_steps"} - OF_BOTH
        is_of_replicas |= names & {*DataParallelOptions.__pydantic_fields__} - OF_BOTH
        if "type" not in names:
            document.setdefault(
                "strategy", copy.deepcopy(REPLICAS if is_of_replicas else FEDERATION)
            )
    place = document
    for depth, key in enumerate(parts[:-1]):
        if not isinstance(place.get(key), dict):
            around, inside = said(".".join(parts[: depth + 1]))
            put(document, around, inside if isinstance(inside, dict) else {"name": inside})
        place = place[key]
    value = copy.deepcopy(value)
    if path in ("", "strategy", "strategy.options") and "type" not in value:
        held = place if not parts else place.setdefault(parts[-1], {})
        for key, item in value.items():
            held[key] = {**held[key], **item} if isinstance(held.get(key), dict) else item
    else:
        place[parts[-1]] = value


OF_BOTH = {"type", "options", "aggregation", "inner", "strategy"}


def told(document: dict[str, Any]) -> list[Violation]:
    try:
        return [*check_submitted(JobSpec.parse(document))]
    except InvalidInputError as error:
        return [*error.violations]


@pytest.mark.parametrize("name", TABLES)
def test_each_row_is_violated_by_a_job(name: str) -> None:
    for _, _, when, field, says in rows(name):
        document = violating(when)
        pattern = ".*".join(map(re.escape, PLACE.split(says)[::2]))
        messages = [
            each.message for each in told(document) if each.field == field.replace("[]", "[0]")
        ]
        assert any(re.fullmatch(pattern, each) for each in messages), (field, when, document)
