"""Data parallelism around a pipeline: equal ranks of all replicas add up their gradients.

Each such column of ranks has an exchange of its own, which adds the logical shards in the same tree
as without pipelines. Knows no stages.
"""

from collections.abc import Iterator

from stratagem.worker.exchange import GradientReducer
from stratagem.worker.pipeline.rank_trainer import StageRunner
from stratagem.worker.pipeline.stage_exchange import StageGradients


class SumOverReplicas:
    """A `Reduce` over an exchange whose buckets are the runner's parameters."""

    def __init__(self, runner: StageRunner, exchange: GradientReducer) -> None:
        self._runner, self._exchange = runner, exchange

    def __call__(self, num_live: int, shards: Iterator[StageGradients]) -> StageGradients:
        exchange, owned = self._exchange, self._exchange.party.owned
        exchange.begin_step(self._runner.step + 1, owned, num_live)
        for shard, computed in enumerate(shards, owned.start):
            exchange.begin_shard(shard)
            exchange.buckets.fill(list(computed.gradients.values()))
            exchange.end_shard(shard, computed.scalars)
        scalars = exchange.finish()
        sums = {name: param.grad for name, param in self._runner.params if param.grad is not None}
        return StageGradients(sums, scalars)
