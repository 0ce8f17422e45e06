"""ModelParallel: the nodes of the model are spread over workers, which pass activations on.

    Direct      a batch goes through the stages as a whole, worker to worker
    Pipeline    in micro-batches, several under way at once (1F1B, https://arxiv.org/abs/2006.09503)
    DataStore   as Direct, through an object store

Every stage is a sole copy: when a worker is lost, a replacement takes its partitions and all stages
return to the last commit. The result has the same bits for any cut of the model.
"""

from stratagem.common.job import JobSpec
from stratagem.common.job.strategy_rules import check_stages
from stratagem.common.strategy import ModelParallel
from stratagem.coordinator.core.effects import ExchangeMethod
from stratagem.coordinator.strategies.synchronous.pipeline_placement import (
    part_per_rank,
    place_replicas,
    why_missing,
)
from stratagem.coordinator.strategies.synchronous.segments.synchronous_run import SegmentRules
from stratagem.coordinator.strategies.synchronous.segments.synchronous_strategy import synchronous


def segment_rules(
    spec: ModelParallel,
    num_replicas: int = 1,
    min_replicas: int = 1,
    exchange: ExchangeMethod = ExchangeMethod.ALL_REDUCE,
) -> SegmentRules:
    """Return the rules of one pipeline, or of several that share the rows of each batch.

    exchange: of the gradients of equal stages.
    """
    return SegmentRules(
        num_shards=num_replicas,
        min_members=1,
        exchange=exchange,
        parts_of=part_per_rank,
        is_sole_copy=True,
        place=place_replicas(spec, num_replicas, min_replicas),
        why_missing=why_missing(spec),
    )


def _shape(job: JobSpec) -> SegmentRules:
    assert isinstance(job.strategy, ModelParallel)
    return segment_rules(job.strategy)


STRATEGY = synchronous(_shape, check_stages)
