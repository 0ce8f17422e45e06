"""The one strict key of a strategy: `options`, where our extras stand."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.common import strategy as s
from stratagem.common.strategy import dump_strategy, parse_strategy
from tests.common.strategy.documents import DATA_PARALLEL, FEDERATED, wrong

pytestmark = pytest.mark.core
SERVER = DATA_PARALLEL | {"aggregation": {"method": "ParameterServer"}}
GOSSIP = DATA_PARALLEL | {"aggregation": {"method": "Decentralized", "topology": "ring"}}
RANDOM = FEDERATED | {"client_selection": {"method": "Random", "fraction": 0.5}}


def outer(name: str, **values: float) -> dict[str, Any]:
    return {"local_steps": 2, "outer": {"name": name, **values}}


@pytest.mark.parametrize(
    ("document", "options", "expected"),
    [
        (DATA_PARALLEL, {"min_replica": 1}, ".min_replica: unknown key; did you mean min_replicas"),
        ({"type": "Local"}, {"a": 1}, ".a: unknown key; known: none"),
        (DATA_PARALLEL, None, ": None is not a mapping of min_replicas, all_reduce"),
        (DATA_PARALLEL, {"min_replicas": 0}, ".min_replicas: 0 is not allowed"),
        (DATA_PARALLEL, {"min_replicas": 3}, ".min_replicas: 3 is more than num_"),
        (DATA_PARALLEL, {"all_reduce": "tree"}, ".all_reduce: 'tree' is not one of direct, ring"),
        (SERVER, {"all_reduce": "ring"}, ".all_reduce: ParameterServer has none; AllReduce has"),
        (DATA_PARALLEL, {"consensus_every": 1}, ".consensus_every: AllReduce keeps all replicas e"),
        (GOSSIP, {"consensus_every": 0}, ".consensus_every: 0 is not allowed; must be >= 1"),
        (DATA_PARALLEL, {"local_steps": 0}, ".local_steps: 0 is not allowed"),
        (DATA_PARALLEL, {"outer": {"name": "mean"}}, ".outer: has a meaning only together with lo"),
        (DATA_PARALLEL, {"outer_bits": 8}, ".outer_bits: has a meaning only together with local_s"),
        (DATA_PARALLEL, {"upload_every": 2}, ".upload_every: has a meaning only together with loc"),
        (DATA_PARALLEL, {"local_steps": 2, "upload_every": 0}, ".upload_every: 0 is not allowed"),
        (DATA_PARALLEL, {"local_steps": 2, "outer_bits": 16}, ".outer_bits: 16 is not one of 8, 4"),
        (DATA_PARALLEL, {"overlap_steps": 1}, ".overlap_steps: has a meaning only together with l"),
        (DATA_PARALLEL, {"local_steps": 6, "fragments": 4}, ".fragments: 4 does not divide local_"),
        (
            DATA_PARALLEL,
            {"local_steps": 6, "fragments": 3, "overlap_steps": 3},
            ".overlap_steps: 3 is more than the 2 steps from one fragment to the",
        ),
        (DATA_PARALLEL, {"local_steps": 6, "mix": 1.0}, ".mix: 1.0 is not allowed"),
        (SERVER, {"local_steps": 6, "fragments": 2}, ".fragments: ParameterServer sums all parame"),
        (DATA_PARALLEL, outer("adam"), ".outer.name: 'adam' is not one of mean, nesterov"),
        (DATA_PARALLEL, outer("mean", lr=1.0), ".outer.lr: unknown key"),
        (DATA_PARALLEL, outer("nesterov", momentum=1.0), ".outer.momentum: 1.0 is not allowed"),
        (DATA_PARALLEL, {"local_steps": 2, "all_reduce": "ring"}, ".all_reduce: ring does not go"),
        (DATA_PARALLEL, {"local_steps": 2, "inner": DATA_PARALLEL}, ".inner: DataParallel/AllRedu"),
        (GOSSIP, {"local_steps": 2}, ".local_steps: Decentralized joins nodes after every step;"),
        (FEDERATED, {"quorum": 0}, ".quorum: 0 is not allowed; must be a count"),
        (FEDERATED, {"quorum": 1.5}, ".quorum: 1.5 is not allowed; must be a"),
        (FEDERATED, {"quorum": True}, ".quorum: True is not a number"),
        (FEDERATED, {"quorum": 5}, ".quorum: 5 is more than num_clients, 4"),
        (FEDERATED, {"round_deadline_s": 3}, ".quorum: missing; round_deadline_s"),
        (FEDERATED, {"local_epochs": 1.0}, ".local_epochs: 1.0 is not a whole"),
        (FEDERATED, {"server_learning_rate": 0.1}, ".server_learning_rate: FedAvg has no server o"),
        (RANDOM, {"late_updates": "drop"}, ".late_updates: must be 'refuse' or {discount: d} with"),
        (RANDOM, {"late_updates": None}, ".late_updates: must be 'refuse' or {dis"),
        (RANDOM, {"late_updates": {}}, ".late_updates: must be 'refuse' or {dis"),
        (RANDOM, {"late_updates": {"discount": 0}}, ".late_updates.discount: 0 is not allowed; mu"),
        (RANDOM, {"late_updates": {"discount": 0.5, "rounds": 2}}, ".late_updates: must be 'refus"),
        (RANDOM, {"late_updates": {"discount": 0.5}}, ".late_updates: no client is ever late with"),
        (RANDOM, {"max_staleness": 2}, '.max_staleness: late_updates is "refuse"'),
        (RANDOM, {"max_staleness": 0}, ".max_staleness: 0 is not allowed"),
        (
            FEDERATED | {"client_selection": {"method": "All"}},
            {"late_updates": {"discount": 0.5}, "quorum": 1, "round_deadline_s": 5},
            ".late_updates: All selects the same clients in every round",
        ),
    ],
)
def test_options_are_strict(document: dict[str, Any], options: object, expected: str) -> None:
    assert wrong(document | {"options": options})[0].startswith(f"strategy.options{expected}")


def test_options_are_written_only_when_they_say_something() -> None:
    assert "options" not in dump_strategy(s.DataParallel(2, s.AllReduce()))
    kept = parse_strategy(FEDERATED | {"options": {"quorum": 1.0, "local_epochs": 1}})
    assert dump_strategy(kept)["options"] == {"quorum": 1.0}
    assert isinstance(kept, s.Federated)
    assert isinstance(kept.options.quorum, float)  # a share of one, not a count of one
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
