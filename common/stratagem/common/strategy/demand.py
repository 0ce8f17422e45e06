"""How many workers a strategy has work for at once."""

from typing import assert_never

from stratagem.common.strategy.choices import Random, num_drawn
from stratagem.common.strategy.kinds import (
    Custom,
    DataParallel,
    Federated,
    Local,
    ModelParallel,
    PopulationBased,
    Strategy,
)


def workers_used(strategy: Strategy) -> int:
    """Return the most workers that a strategy can use at once.

    It may well begin with fewer. A Custom strategy says nothing of it beforehand, and counts as 1.
    """
    match strategy:
        case Local() | Custom():
            return 1
        case ModelParallel():
            return len(strategy.partitions)
        case DataParallel():
            return strategy.num_replicas * _inside(strategy.options.inner)
        case PopulationBased():
            return strategy.population_size * _inside(strategy.options.inner)
        case Federated():
            selection, num_clients = strategy.client_selection, strategy.num_clients
            if isinstance(selection, Random):
                num_clients = num_drawn(selection.fraction, num_clients)
            return num_clients * _inside(strategy.options.inner)
        case _:
            assert_never(strategy)


def _inside(inner: Strategy | None) -> int:
    return 1 if inner is None else workers_used(inner)
