"""The settings that go together with training rows that come as a stream, whose length is unknown.

A job says that its rows do by `data.streams` or `data.shuffle_rows`; where it says neither, only
the worker that loads the data knows, and asks here again.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stratagem.common.base.errors import Violation
from stratagem.common.strategy import (
    DataParallel,
    Decentralized,
    Federated,
    Local,
    ModelParallel,
    Strategy,
    local_steps_of,
)

if TYPE_CHECKING:
    from stratagem.common.job.spec import JobSpec


def says_stream(job: "JobSpec") -> bool:
    """Return whether the job itself says that its training rows come as a stream."""
    return job.data.streams is not None or job.data.shuffle_rows is not None


def num_shards_of(strategy: Strategy) -> int:
    """Return the logical shards that each batch of the innermost strategy is cut into."""
    match strategy:
        case DataParallel():
            return strategy.num_replicas
        case _:
            inner = _inner(strategy)
            return 1 if inner is None else num_shards_of(inner)


def against_streams(job: "JobSpec") -> Iterator[Violation]:
    """Yield what cannot go together with a stream of training rows."""
    if job.epochs is not None:
        yield Violation(
            "epochs",
            "is not allowed with a stream of rows (data.streams), whose length is not known; "
            "set steps instead",
        )
    for name, every in (
        ("evaluation.every", job.evaluation.every if job.evaluation else None),
        ("checkpoint.every", job.checkpoint.every),
    ):
        if every is not None and every.unit == "epoch":
            text = f"'{every}' is not allowed with a stream of rows (data.streams); count in steps"
            yield Violation(name, text)
    if job.evaluation is not None and job.evaluation.split == "train":
        yield Violation(
            "evaluation.split",
            "'train' is a stream of rows (data.streams); what is evaluated must have a len()",
        )
    if job.data.order is not None:
        text = "is not allowed with data.streams: a stream decides its order; see data.shuffle_rows"
        yield Violation("data.order", text)
    if job.turns is not None:
        text = "read the rows of a step again in each turn, which a stream (data.streams) cannot"
        yield Violation("turns", text)
    if job.data.readers:
        text = "reads rows by number, which those of a stream (data.streams) have not; leave it out"
        yield Violation("data.readers", text)
    if job.execution.memory == "Cached":
        text = "Cached reads each row once, so it cannot go with a stream of rows (data.streams)"
        yield Violation("execution.memory", text)
    if job.partition is not None:
        yield Violation(
            "partition",
            "divides rows by their numbers, which those of a stream (data.streams) have not; a "
            "data function that takes client_id and num_clients gives a client's own stream",
        )
    yield from _against_strategy(job, job.strategy, "strategy")


def _against_strategy(job: "JobSpec", strategy: Strategy, path: str) -> Iterator[Violation]:
    inner = _inner(strategy)
    match strategy:
        case ModelParallel():
            text = "is ModelParallel, which cannot go with a stream of rows (data.streams)"
            yield Violation(path, f"{text}; Local and DataParallel can")
        case DataParallel(aggregation=Decentralized()):
            text = "Decentralized cannot go with a stream of rows (data.streams); AllReduce and"
            yield Violation(f"{path}.aggregation.method", f"{text} ParameterServer can")
        case DataParallel() if local_steps_of(strategy) is not None:
            text = "cannot go with a stream of rows (data.streams): replicas go back together only"
            yield Violation(f"{path}.options.local_steps", f"{text} where rows have numbers")
        case Federated():
            if job.data.streams is not None:
                text = "has no meaning under Federated: each client reads one stream of its own"
                yield Violation("data.streams", text)
            if inner is not None and not isinstance(inner, Local):
                text = "cannot go with a stream of rows (data.streams): a client is one worker then"
                yield Violation(f"{path}.options.inner", text)
        case DataParallel() | Local() if job.data.streams is not None:
            yield from _not_a_multiple(job.data.streams, num_shards_of(strategy), path)
        case _:
            pass
    if inner is not None and not isinstance(strategy, Federated):
        yield from _against_strategy(job, inner, f"{path}.options.inner")


def _not_a_multiple(num_streams: int, num_shards: int, path: str) -> Iterator[Violation]:
    if num_streams % num_shards:
        text = f"{num_streams} is not a multiple of {path}.num_replicas, which is {num_shards}"
        yield Violation("data.streams", text)


def _inner(strategy: Strategy) -> Strategy | None:
    inner: Strategy | None = getattr(strategy.options, "inner", None)
    return inner
