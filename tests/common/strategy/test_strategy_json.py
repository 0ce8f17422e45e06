"""The JSON form of strategies: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from structlog.testing import LogCapture

from stratagem.common import strategy as s
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.schema import document
from stratagem.common.strategy import describe, dump_strategy, dumps_strategy, parse_strategy
from stratagem.common.strategy.strategies import MAX_CLIENTS, MAX_POPULATION, MAX_REPLICAS
from tests.common.strategy.documents import DATA_PARALLEL, FEDERATED, POPULATION, wrong
from tests.common.strategy.strategies import EXAMPLES, training_strategies

pytestmark = pytest.mark.core


def model_parallel(**changes: Any) -> dict[str, Any]:
    partition = {"node_ids": ["a"], "target": {"Tag": "gpu"}} | changes
    direct = {"communication": {"protocol": "Direct"}}
    return {"type": "ModelParallel", "partitions": [partition], **direct}


def prox(mu: object) -> dict[str, Any]:
    return FEDERATED | {"aggregation": {"method": "FedProx", "mu": mu}}


@pytest.mark.parametrize("text", EXAMPLES)
def test_every_example_round_trips(text: str) -> None:
    strategy = parse_strategy(text)
    assert json.loads(dumps_strategy(strategy)) == json.loads(text)
    assert parse_strategy(dump_strategy(strategy)) == strategy
    if not isinstance(strategy, s.Custom):  # whose keys come back in order
        assert dumps_strategy(strategy) == text


def test_the_examples_name_every_variant() -> None:
    assert {describe(parse_strategy(text)) for text in EXAMPLES} == {
        *("Local", "Custom/elastic", "PopulationBased/Truncation", "PopulationBased/Binary"),
        *(f"DataParallel/{name}" for name in ("AllReduce", "ParameterServer", "Decentralized")),
        *(f"ModelParallel/{name}" for name in ("Pipeline", "DataStore", "Direct")),
        *(f"Federated/{name}" for name in ("FedAvg", "FedProx", "FedYogi")),
    }


@settings(max_examples=50)
@given(training_strategies)
def test_reading_what_was_written_gives_the_same_strategy(strategy: s.Strategy) -> None:
    assert parse_strategy(dumps_strategy(strategy)) == strategy
    assert parse_strategy(dump_strategy(strategy)) == strategy


def test_keys_may_stand_in_any_order_and_integers_are_floats_where_those_are_due() -> None:
    backwards = dict(reversed(DATA_PARALLEL.items()))
    assert parse_strategy(json.dumps(backwards)) == s.DataParallel(2, s.AllReduce())
    assert '"mu":1.0' in dumps_strategy(parse_strategy(prox(1)))
    assert '"mu":1.0' in dumps_strategy(s.Federated(1, 1, s.FedProx(1), s.All()))
    strategy = s.Custom("mine", {"b": {"d": 1, "c": None}, "a": []})
    assert dumps_strategy(strategy) == (
        '{"type":"Custom","coordinator":"mine","config":{"a":[],"b":{"c":null,"d":1}}}'
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('["Local"]', "strategy: ['Local'] is not a mapping such as {type: Local}"),
        ('"Local"', "strategy: 'Local' is not a mapping such as {type: Local}"),
        ("{", "strategy: not valid JSON: Expecting property name enclosed in double quotes"),
        ('{"type":"Local","type":"Local"}', "strategy.type: duplicate key"),
        ("{}", "strategy.type: missing; one of Local, DataParallel"),
        ('{"type":"local"}', "strategy.type: 'local' is not one of Local, DataParallel"),
        ('{"type":null}', "strategy.type: None is not one of"),
        ('{"type":"Custom","coordinator":"x"}', "strategy.config: missing"),
        ('{"type":"Custom","coordinator":"x","config":NaN}', "strategy: not valid JSON: NaN is"),
        ('{"type":"Custom","coordinator":"x","config":1e999}', "strategy.config: inf is not a"),
        ('{"type":"Custom","coordinator":"","config":1}', "strategy.coordinator: '' is not allow"),
        (r'{"type":"Custom","coordinator":"\ud800","config":1}', "strategy.coordinator: '\\ud800'"),
        ("[" * 100_000, "strategy: nested deeper than 64 levels"),
        ('{"type":"Custom","coordinator":"x","config":' + "[" * 70 + "]" * 70 + "}", "strategy.co"),
    ],
)
def test_malformed_text_is_refused(source: str, expected: str) -> None:
    assert wrong(source)[0].startswith(expected)


def test_only_integers_are_counts() -> None:
    for value in (4.0, "4", True, None, [4]):
        (found,) = wrong(DATA_PARALLEL | {"num_replicas": value})
        assert found == f"strategy.num_replicas: {value!r} is not a whole number"


@pytest.mark.parametrize(
    ("document", "field", "most"),
    [
        (DATA_PARALLEL, "num_replicas", MAX_REPLICAS),
        (FEDERATED, "num_clients", MAX_CLIENTS),
        (FEDERATED, "rounds", 2**64 - 1),
        (POPULATION, "population_size", MAX_POPULATION),
        (POPULATION, "generations", 2**64 - 1),
    ],
)
def test_counts_are_from_one_to_an_end(document: dict[str, Any], field: str, most: int) -> None:
    largest = parse_strategy(document | {field: most})
    assert parse_strategy(dumps_strategy(largest)) == largest
    for value in (0, -1, most + 1):
        (found,) = wrong(document | {field: value})
        assert found.startswith(f"strategy.{field}: {value} is not allowed; must be ")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (DATA_PARALLEL | {"aggregation": {"method": "AllReduse"}}, "strategy.aggregation.method: "),
        (DATA_PARALLEL | {"aggregation": "AllReduce"}, "strategy.aggregation: 'AllReduce' is not"),
        (
            DATA_PARALLEL | {"aggregation": {"method": "Decentralized", "topology": "cube"}},
            "strategy.aggregation.topology: 'cube' is not allowed; known topologies: ring, "
            "complete, star, torus, torus:RxC, hypercube, exponential, random:K",
        ),
        (
            model_parallel() | {"communication": {"protocol": "Pipeline", "micro_batch_size": 0}},
            "strategy.communication.micro_batch_size: 0 is not allowed; must be >= 1",
        ),
        (prox(-0.5), "strategy.aggregation.mu: -0.5 is not allowed; must be >= 0"),
        (prox(None), "strategy.aggregation.mu: None is not a number"),
        (prox(True), "strategy.aggregation.mu: True is not a number"),
        (prox(10**400), f"strategy.aggregation.mu: 1{'0' * 76}... is not a finite number"),
        (
            FEDERATED | {"client_selection": {"method": "Random", "fraction": 0}},
            "strategy.client_selection.fraction: 0 is not allowed; must be in (0, 1]",
        ),
        (
            FEDERATED | {"client_selection": {"method": "ByCapability", "required_tags": "gpu"}},
            "strategy.client_selection.required_tags: 'gpu' is not a list",
        ),
        (
            POPULATION | {"exploit": {"method": "Truncation", "fraction": 1.5}},
            "strategy.exploit.fraction: 1.5 is not allowed; must be in (0, 1]",
        ),
        (model_parallel(target={"tag": "x"}), "strategy.partitions[0].target: 'tag' is not one of"),
        (model_parallel(target="x"), "strategy.partitions[0].target: 'x' is not one of {Tag: text"),
        (model_parallel(target={"Tag": 1}), "strategy.partitions[0].target.Tag: 1 is not text"),
        (model_parallel(target={"Tag": ""}), "strategy.partitions[0].target.Tag: '' is not allo"),
        (model_parallel(target={"Tag": "x", "WorkerId": "y"}), "strategy.partitions[0].target: {'"),
        (model_parallel(node_ids=[]), "strategy.partitions[0].node_ids: [] is not allowed; must"),
        (model_parallel() | {"partitions": []}, "strategy.partitions: [] is not allowed; must"),
    ],
)
def test_wrong_values_are_named(document: dict[str, Any], expected: str) -> None:
    assert wrong(document)[0].startswith(expected)


def test_all_that_is_wrong_is_named_at_once() -> None:
    aggregation = {"method": "FedYogi", "beta1": 1, "beta2": -0.1, "tau": 0}
    document = FEDERATED | {"aggregation": aggregation, "num_clients": 0, "rounds": "3"}
    assert wrong(document) == [
        f"strategy.num_clients: 0 is not allowed; must be >= 1 and <= {MAX_CLIENTS}",
        "strategy.rounds: '3' is not a whole number",
        "strategy.aggregation.beta1: 1 is not allowed; must be in [0, 1)",
        "strategy.aggregation.beta2: -0.1 is not allowed; must be in [0, 1)",
        "strategy.aggregation.tau: 0 is not allowed; must be > 0",
    ]
    document = {"type": "DataParallel", "num_replica": 2, "aggregation": {"method": "AllReduce"}}
    assert wrong(document) == [
        "strategy.num_replicas: missing; is it num_replica?; for example num_replicas: 2"
    ]
    with pytest.raises(InvalidInputError, match=r"^num_replicas: 0 is not allowed; must be >= 1"):
        s.DataParallel(0, s.AllReduce())
    with pytest.raises(InvalidInputError, match="num_clients: True"):
        s.Federated(True, 1, s.FedAvg(), s.All())
    assert not s.is_distributed(s.Local())
    assert s.is_distributed(s.DataParallel(1, s.AllReduce()))


def test_unknown_keys_are_ignored_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    # a logger of our own: others may have configured and cached the shared one
    logs = LogCapture()
    monkeypatch.setattr(document, "_log", structlog.wrap_logger(None, processors=[logs]))
    for text in EXAMPLES:  # nor is a key of another form taken for one
        parse_strategy(text)
    assert logs.entries == []
    mean = {"method": "AllReduce", "type": "Mean", "x": 1}
    written = DATA_PARALLEL | {"replicas": 3, "aggregation": mean}
    assert parse_strategy(written) == s.DataParallel(2, s.AllReduce())
    assert [(each["key"], each["event"]) for each in logs.entries] == [
        ("strategy.aggregation.type", "unknown key is ignored"),
        ("strategy.aggregation.x", "unknown key is ignored"),
        ("strategy.replicas", "unknown key is ignored; did you mean num_replicas?"),
    ]
    logs.entries.clear()
    written = model_parallel() | {"partitions": [{**model_parallel()["partitions"][0], "nodes": 1}]}
    parse_strategy(written)
    assert [each["key"] for each in logs.entries] == ["strategy.partitions[0].nodes"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_cannot_be_read_back_cannot_be_written(value: float) -> None:
    with pytest.raises(InvalidInputError, match="mu"):
        s.FedProx(value)
    config: dict[str, Any] = {"x": 1.0}
    strategy = s.Custom("mine", config)
    config["x"] = value
    assert s.dump_strategy(strategy)["config"] == {"x": 1.0}
    with pytest.raises(InvalidInputError, match=r"x: .* is not a finite number"):
        s.Custom("mine", config)
