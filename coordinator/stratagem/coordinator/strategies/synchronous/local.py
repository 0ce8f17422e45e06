"""Local: one worker trains the whole model on all the data.

The general case with one logical shard and one member; the plain loop of any PyTorch tutorial.
"""

from stratagem.common.base.errors import Violation
from stratagem.common.job import JobSpec
from stratagem.coordinator.strategies.synchronous.segments import Shape, Synchronous


def _check(job: JobSpec) -> list[Violation]:
    """Every valid job can run under Local."""
    del job
    return []


def _shape(job: JobSpec) -> Shape:
    del job
    return Shape(num_shards=1, min_members=1)


STRATEGY = Synchronous(_check, _shape)
