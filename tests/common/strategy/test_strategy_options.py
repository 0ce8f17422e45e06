"""The one strict key of a strategy: `options`, where our extras stand."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.common import strategy as s
from stratagem.common.strategy import dump_strategy, parse_strategy
from tests.common.strategy.documents import DATA_PARALLEL, FEDERATED, wrong

pytestmark = pytest.mark.core
RANDOM = FEDERATED | {"client_selection": {"method": "Random", "fraction": 0.5}}


@pytest.mark.parametrize(
    ("document", "options", "expected"),
    [
        (
            DATA_PARALLEL,
            {"min_replica": 1},
            "strategy.options.min_replica: unknown key; did you mean min_replicas?",
        ),
        ({"type": "Local"}, {"a": 1}, "strategy.options.a: unknown key; known: none"),
        (
            DATA_PARALLEL,
            None,
            "strategy.options: None is not a mapping of min_replicas, all_reduce",
        ),
        (DATA_PARALLEL, {"min_replicas": 0}, "strategy.options.min_replicas: 0 is not allowed"),
        (DATA_PARALLEL, {"min_replicas": 3}, "strategy.options.min_replicas: 3 is more than num_"),
        (
            DATA_PARALLEL,
            {"all_reduce": "tree"},
            "strategy.options.all_reduce: 'tree' is not one of direct, ring, native",
        ),
        (
            DATA_PARALLEL | {"aggregation": {"method": "ParameterServer"}},
            {"all_reduce": "ring"},
            "strategy.options.all_reduce: ParameterServer has none; AllReduce has",
        ),
        (
            DATA_PARALLEL,
            {"consensus_every": 1},
            "strategy.options.consensus_every: AllReduce keeps all replicas equal; Decentralized",
        ),
        (
            DATA_PARALLEL | {"aggregation": {"method": "Decentralized", "topology": "ring"}},
            {"consensus_every": 0},
            "strategy.options.consensus_every: 0 is not allowed; must be >= 1",
        ),
        (DATA_PARALLEL, {"local_steps": 0}, "strategy.options.local_steps: 0 is not allowed"),
        (
            DATA_PARALLEL,
            {"outer": {"name": "mean"}},
            "strategy.options.outer: has a meaning only together with local_steps",
        ),
        (
            DATA_PARALLEL,
            {"outer_bits": 8},
            "strategy.options.outer_bits: has a meaning only together with local_steps",
        ),
        (
            DATA_PARALLEL,
            {"upload_every": 2},
            "strategy.options.upload_every: has a meaning only together with local_steps",
        ),
        (
            DATA_PARALLEL,
            {"local_steps": 2, "upload_every": 0},
            "strategy.options.upload_every: 0 is not allowed; must be >= 1",
        ),
        (
            DATA_PARALLEL,
            {"local_steps": 2, "outer_bits": 16},
            "strategy.options.outer_bits: 16 is not one of 8, 4",
        ),
        (
            DATA_PARALLEL,
            {"overlap_steps": 1},
            "strategy.options.overlap_steps: has a meaning only together with local_steps",
        ),
        (
            DATA_PARALLEL,
            {"local_steps": 6, "fragments": 4},
            "strategy.options.fragments: 4 does not divide local_steps, 6",
        ),
        (
            DATA_PARALLEL,
            {"local_steps": 6, "fragments": 3, "overlap_steps": 3},
            "strategy.options.overlap_steps: 3 is more than the 2 steps from one fragment to the",
        ),
        (DATA_PARALLEL, {"local_steps": 6, "mix": 1.0}, "strategy.options.mix: 1.0 is not allowed"),
        (
            DATA_PARALLEL | {"aggregation": {"method": "ParameterServer"}},
            {"local_steps": 6, "fragments": 2},
            "strategy.options.fragments: ParameterServer sums all parameters in one step;",
        ),
        (
            DATA_PARALLEL,
            {"local_steps": 2, "outer": {"name": "adam"}},
            "strategy.options.outer.name: 'adam' is not one of mean, nesterov",
        ),
        (
            DATA_PARALLEL,
            {"local_steps": 2, "outer": {"name": "mean", "lr": 1.0}},
            "strategy.options.outer.lr: unknown key",
        ),
        (
            DATA_PARALLEL,
            {"local_steps": 2, "outer": {"name": "nesterov", "momentum": 1.0}},
            "strategy.options.outer.momentum: 1.0 is not allowed",
        ),
        (
            DATA_PARALLEL,
            {"local_steps": 2, "all_reduce": "ring"},
            "strategy.options.all_reduce: ring does not go together with local_steps; direct does",
        ),
        (
            DATA_PARALLEL,
            {"local_steps": 2, "inner": DATA_PARALLEL},
            "strategy.options.inner: DataParallel/AllReduce cannot take local steps; a single",
        ),
        (
            DATA_PARALLEL | {"aggregation": {"method": "Decentralized", "topology": "ring"}},
            {"local_steps": 2},
            "strategy.options.local_steps: Decentralized joins nodes after every step;",
        ),
        (FEDERATED, {"quorum": 0}, "strategy.options.quorum: 0 is not allowed; must be a count"),
        (FEDERATED, {"quorum": 1.5}, "strategy.options.quorum: 1.5 is not allowed; must be a"),
        (FEDERATED, {"quorum": True}, "strategy.options.quorum: True is not a number"),
        (FEDERATED, {"quorum": 5}, "strategy.options.quorum: 5 is more than num_clients, 4"),
        (FEDERATED, {"round_deadline_s": 3}, "strategy.options.quorum: missing; round_deadline_s"),
        (FEDERATED, {"local_epochs": 1.0}, "strategy.options.local_epochs: 1.0 is not a whole"),
        (
            FEDERATED,
            {"server_learning_rate": 0.1},
            "strategy.options.server_learning_rate: FedAvg has no server optimizer",
        ),
        (
            RANDOM,
            {"late_updates": "drop"},
            "strategy.options.late_updates: must be 'refuse' or {discount: d} with d in (0, 1]",
        ),
        (RANDOM, {"late_updates": None}, "strategy.options.late_updates: must be 'refuse' or {dis"),
        (RANDOM, {"late_updates": {}}, "strategy.options.late_updates: must be 'refuse' or {dis"),
        (
            RANDOM,
            {"late_updates": {"discount": 0}},
            "strategy.options.late_updates.discount: 0 is not allowed; must be in (0, 1]",
        ),
        (
            RANDOM,
            {"late_updates": {"discount": 0.5, "rounds": 2}},
            "strategy.options.late_updates: must be 'refuse' or {discount: d}",
        ),
        (
            RANDOM,
            {"late_updates": {"discount": 0.5}},
            "strategy.options.late_updates: no client is ever late without round_deadline_s",
        ),
        (RANDOM, {"max_staleness": 2}, 'strategy.options.max_staleness: late_updates is "refuse"'),
        (RANDOM, {"max_staleness": 0}, "strategy.options.max_staleness: 0 is not allowed"),
        (
            FEDERATED | {"client_selection": {"method": "All"}},
            {"late_updates": {"discount": 0.5}, "quorum": 1, "round_deadline_s": 5},
            "strategy.options.late_updates: All selects the same clients in every round",
        ),
    ],
)
def test_options_are_strict(document: dict[str, Any], options: object, expected: str) -> None:
    assert wrong(document | {"options": options})[0].startswith(expected)


def test_options_are_written_only_when_they_say_something() -> None:
    assert "options" not in dump_strategy(s.DataParallel(2, s.AllReduce()))
    kept = parse_strategy(FEDERATED | {"options": {"quorum": 1.0, "local_epochs": 1}})
    assert dump_strategy(kept)["options"] == {"quorum": 1.0}
    assert isinstance(kept, s.Federated)
    assert isinstance(kept.options.quorum, float)  # a share of one, not a count of one


def test_late_updates_are_a_word_or_a_discount() -> None:
    options = {"late_updates": {"discount": 0.5}, "max_staleness": 2, "over_select": 1}
    kept = parse_strategy(RANDOM | {"options": options})
    assert isinstance(kept, s.Federated)
    assert kept.options.late_updates == s.Discount(0.5)
    assert dump_strategy(kept)["options"] == {
        "over_select": 1,
        "late_updates": {"discount": 0.5},
        "max_staleness": 2,
    }
    refused = parse_strategy(RANDOM | {"options": {"late_updates": "refuse"}})
    assert refused == parse_strategy(RANDOM)
    assert "options" not in dump_strategy(refused)
