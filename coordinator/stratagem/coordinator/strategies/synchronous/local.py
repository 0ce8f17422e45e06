"""Local: one worker trains the whole model on all the data.

The general case with one logical shard and one member; the plain loop of any PyTorch tutorial.
"""

from stratagem.coordinator.strategies.synchronous.party import SegmentRules
from stratagem.coordinator.strategies.synchronous.strategy import synchronous

STRATEGY = synchronous(lambda _job: SegmentRules(num_shards=1, min_members=1))
