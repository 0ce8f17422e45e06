"""DataParallel: every global batch is divided into num_replicas logical shards.

Gradients are summed over the shards in a fixed binary tree and divided once (synchronous SGD as in
https://arxiv.org/abs/1706.02677, weighted by rows). The sum does not depend on the number of
workers: with fewer than num_replicas some compute several shards, with the same bits. So a lost
worker is not waited for; the survivors redo the step, and a replacement joins when it comes.

AllReduce moves the gradients between the workers; ParameterServer moves them through the
coordinator, which only adds them up. Decentralized sums no gradients: each shard is a node with
parameters of its own, which it averages with its neighbours' after every step (D-PSGD,
https://arxiv.org/abs/1705.09056). With `local_steps` each shard is a replica with parameters and an
optimizer of its own, and the replicas are joined after so many steps (DiLoCo,
https://arxiv.org/abs/2311.08105). A worker then holds the only copy of its nodes or replicas. It
also holds the only copy of the residuals of its shards, if the job's codec keeps residuals, and of
its slice of the optimizer's state with `partition_state` (https://arxiv.org/abs/1910.02054), unless
its neighbour mirrors the slice (`mirror`, https://doi.org/10.1145/3600006.3613145); all workers
have the rest of the state.
"""

from collections.abc import Mapping
from functools import partial

from stratagem.common.job import JobSpec
from stratagem.common.job.rules import REPLICAS
from stratagem.common.schema.table import found_in
from stratagem.common.strategy import (
    AllReduce,
    DataParallel,
    Decentralized,
    ModelParallel,
    ParameterServer,
    are_models_apart,
    fewest_mirrored,
    partitions_state,
    upload_every_of,
)
from stratagem.coordinator.core.effects import ExchangeMethod
from stratagem.coordinator.strategies.synchronous import pipelines
from stratagem.coordinator.strategies.synchronous.party import (
    SegmentRules,
    one_part,
    part_per_member,
)
from stratagem.coordinator.strategies.synchronous.strategy import synchronous

_EXCHANGES: Mapping[type, ExchangeMethod] = {
    AllReduce: ExchangeMethod.ALL_REDUCE,
    ParameterServer: ExchangeMethod.PARAMETER_SERVER,
    Decentralized: ExchangeMethod.GOSSIP,
}


def _shape(job: JobSpec) -> SegmentRules:
    strategy = job.strategy
    assert isinstance(strategy, DataParallel)
    options = strategy.options
    exchange = _EXCHANGES[type(strategy.aggregation)]
    if isinstance(options.inner, ModelParallel):
        return pipelines.segment_rules(
            options.inner, strategy.num_replicas, options.min_replicas, exchange
        )
    # Residuals of a codec belong to shards: the owner of a shard has the only copy of its residual.
    has_residuals = job.compression is not None and job.compression.keeps_state
    is_divided = are_models_apart(strategy) or partitions_state(strategy)
    is_sole_copy = is_divided or has_residuals
    return SegmentRules(
        strategy.num_replicas,
        options.min_replicas,
        exchange,
        parts_of=part_per_member if is_sole_copy else one_part,
        upload_every=upload_every_of(strategy),
        is_sole_copy=is_sole_copy,
        fewest_mirrored=fewest_mirrored(strategy),
    )


STRATEGY = synchronous(_shape, partial(found_in, REPLICAS))
