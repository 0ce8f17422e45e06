"""Models with tensors that are seldom met, on real workers: each run ends, with the bits of its
loop or with a sentence, and its workers take the next one."""

from typing import Any

import pytest

from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import StratagemError
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated
from tests.cluster.jobs import (
    ALLOWED,
    assert_same_bits,
    data_parallel,
    federated,
    gossip,
    population,
    train,
)
from tests.jobs import job
from tests.odd_kinds import BUILT, EXACT, TRAINED, Kind
from tests.reference.gossip_loop import gossip_loop
from tests.reference.loops import federated_loop, sharded_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("tensors that are seldom met end a run with its bits or a sentence"),
]

STRATEGIES = ("Local", "AllReduce", "ParameterServer", "Decentralized", "Federated", "Population")


def spec_of(kind: Kind, strategy: str) -> JobSpec:
    sections: dict[str, Any] = dict(kind.sections)
    match strategy:
        case "Federated":
            return federated(kind.entrypoint, **{"batch_size": 8, "rounds": 2, **sections})
        case "Population":
            space = {"optimizer.lr": {"low": 0.001, "high": 1.0, "scale": "log"}}
            shared = {"evaluation": {"split": "test", "best": "loss", "mode": "min"}}
            changes = {"model": kind.entrypoint, "search_space": space, **shared, **sections}
            return population(2, 2, **changes)
        case "Local":
            return job(kind.entrypoint, **sections)
        case "Decentralized":
            return job(kind.entrypoint, strategy=gossip(2), **sections)
        case _:
            return job(kind.entrypoint, strategy=data_parallel(2, strategy), **sections)


def check_run(client: Client, kind: Kind, strategy: str) -> None:
    """Run a kind to its end, and compare what comes of it with what the table says."""
    spec = spec_of(kind, strategy)
    if kind.refused:
        with pytest.raises(StratagemError, match=kind.refused):
            train(client, spec)
        return
    outcome = train(client, spec)
    if isinstance(spec.strategy, Federated):
        assert_same_bits(outcome.state, federated_loop(spec, ALLOWED).state)
    elif strategy == "Decentralized":
        assert_same_bits(outcome.state, gossip_loop(spec, ALLOWED).mean)
    elif strategy != "Population":
        num_shards = 1 if strategy == "Local" else 2
        assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, num_shards).state)


PAIRS = [
    *zip(BUILT[:: len(BUILT) // 2], ("Local", "Federated", "Population"), strict=False),
    *zip(TRAINED, STRATEGIES, strict=False),
    *((kind, STRATEGIES[number % len(STRATEGIES)]) for number, kind in enumerate(EXACT[::2])),
]
"""Each strategy has a kind that is refused in its training, and kinds that are exact. Which kinds
there are is the engine's matter, and in its tests."""


@pytest.mark.parametrize(("kind", "strategy"), PAIRS, ids=str)
def test_a_kind_ends_its_run_alone(client: Client, kind: Kind, strategy: str) -> None:
    check_run(client, kind, strategy)
