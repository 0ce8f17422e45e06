"""The state that a job ends with, by the reference for its strategy, in this process."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stratagem.common.base.ids import WorkerId
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated
from stratagem.coordinator.core.facts import ClientBinding
from stratagem.coordinator.strategies.federated.decisions import select
from tests.cluster.jobs import ALLOWED
from tests.reference.client_turns import federated_turns_loop
from tests.reference.compressed_loop import compressed_loop
from tests.reference.gossip_loop import gossip_loop
from tests.reference.local_steps_loop import local_steps_loop
from tests.reference.loops import federated_loop, sharded_loop
from tests.reference.phases_loop import phases_loop
from tests.reference.turns_loop import turns_loop

WHOLE = 2**62
"""Rows of a micro-batch that is the whole shard."""


def bits_of(spec: JobSpec) -> Mapping[str, Tensor]:
    """Any strategy but populations, and silos."""
    if isinstance(spec.strategy, Federated):
        if spec.turns is not None:
            return federated_turns_loop(spec, ALLOWED).state
        return federated_loop(spec, ALLOWED, lambda round_num: drawn(spec, round_num)).state
    document: dict[str, Any] = spec.document()
    strategy = document["strategy"]
    if strategy.get("aggregation", {}).get("method") == "Decentralized":
        return gossip_loop(spec, ALLOWED).mean
    if strategy.get("options", {}).get("local_steps") is not None:
        return local_steps_loop(spec, ALLOWED).state
    num_shards, stages = _shards_and_stages(strategy)
    if spec.compression is not None:
        return compressed_loop(spec, ALLOWED, num_shards).state
    if spec.phases is not None:
        return phases_loop(spec, ALLOWED, num_shards, spec.steps or 0).result.state
    if spec.turns is not None:
        return turns_loop(spec, ALLOWED, num_shards, spec.steps or 0).state
    rows = None
    if stages is not None:
        accumulated = spec.accumulation.micro_batch_size if spec.accumulation else None
        rows = stages["communication"].get("micro_batch_size") or accumulated or WHOLE
    return sharded_loop(spec, ALLOWED, num_shards, micro_batch_size=rows).state


def drawn(spec: JobSpec, round_num: int) -> list[int]:
    """The clients of a round, by the seed of the job."""
    assert isinstance(spec.strategy, Federated)
    clients = range(spec.strategy.num_clients)
    roster = [ClientBinding(client=n, worker_id=WorkerId("any"), tags=()) for n in clients]
    over = spec.strategy.options.over_select or 0
    return list(select(spec.strategy.client_selection, roster, spec.seed, round_num, over))


def _shards_and_stages(strategy: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
    """How many shards a batch has, over all levels, and the stages inside, if there are any."""
    if strategy["type"] == "ModelParallel":
        return 1, strategy
    if strategy["type"] == "Local":
        return 1, None
    inner = strategy.get("options", {}).get("inner") or {"type": "Local"}
    num_shards, stages = _shards_and_stages(inner)
    return strategy["num_replicas"] * num_shards, stages
