"""Members of one party as threads of the test's process; they share memory as processes do."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from stratagem.common.numerics.shards import assign_shards
from stratagem.worker.engine import StepReport, Trainer
from stratagem.worker.exchange import (
    GradientBuckets,
    GradientReducer,
    SingleMemberReducer,
    mesh_exchange,
)
from tests.patience import PATIENCE_S
from tests.worker.engine.support import solo
from tests.worker.mesh.engines import links_of

Value = TypeVar("Value")


@contextmanager
def exchanges(
    trainers: list[Trainer], num_shards: int
) -> Iterator[list[GradientReducer | SingleMemberReducer]]:
    """One exchange for each member, connected."""
    size = len(trainers)
    if size == 1:
        yield [solo(trainers[0], num_shards)]
        return
    with links_of("shm", size) as groups:

        def connect(rank: int) -> GradientReducer | SingleMemberReducer:
            trainer = trainers[rank]
            buckets = GradientBuckets(trainer.params, num_extras=trainer.num_extras)
            settings: dict[str, Any] = {"deadline_s": PATIENCE_S, "compressor": trainer.compressor}
            return mesh_exchange(buckets, groups[rank], num_shards, **settings)

        made = together([partial(connect, rank) for rank in range(size)])
        yield made
        for exchange in made:
            exchange.cut()
            exchange.close()


def together(calls: list[Callable[[], Value]]) -> list[Value]:
    """All calls at once; their answers, or the first error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def train_together(
    trainers: list[Trainer], num_shards: int, to_step: int
) -> list[list[StepReport]]:
    """Every member trains to the step; their reports."""
    with exchanges(trainers, num_shards) as connected:
        owned = assign_shards(num_shards, len(trainers))

        def run(rank: int) -> list[StepReport]:
            reports = []
            while trainers[rank].step < to_step:
                reports.append(trainers[rank].train_step(connected[rank], owned[rank], num_shards))
            return reports

        return together([partial(run, rank) for rank in range(len(trainers))])
