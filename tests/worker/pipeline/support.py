"""Jobs, graphs, and parties of ranks that the pipeline's tests share."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.worker.data.sources import DataSources
from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.pipeline.build import RankEndpoint, StageAssignment, build_stage_runner
from stratagem.worker.pipeline.messages import (
    Address,
    LocalPost,
    LocalTransport,
    Message,
    StageTransport,
)
from stratagem.worker.pipeline.rank_trainer import StageRunner
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.jobs import ALLOW, job, user_data
from tests.patience import PATIENCE_S

ALLOWED = EntryPoints([ALLOW])
T = TypeVar("T")

SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ADAM = {"name": "adamw", "lr": 0.01, "clip_norm": 0.5, "schedule": {"name": "cosine"}}


def deep_job(model: str | dict[str, Any] = "deep", **changes: Any) -> JobSpec:
    """Of eight nodes. The last of three batches is short."""
    data = user_data("classes", num_rows=22)
    return job(model, **{"data": data, "steps": 5, "batch_size": 8, "optimizer": SGD, **changes})


class TakingTurns:
    """Any transport, for ranks that are threads of one process: they share torch's generators, so
    only the one that holds `turn` computes, and it gives `turn` away while it waits."""

    def __init__(self, inner: StageTransport, turn: threading.Lock) -> None:
        self._inner, self._turn = inner, turn

    def begin(self, step: int, awaited: Iterable[Address]) -> None:
        self._inner.begin(step, awaited)

    def send(self, address: Address, message: Message) -> None:
        self._inner.send(address, message)

    def recv(self, address: Address, timeout_s: float) -> Message:
        self._turn.release()
        try:
            return self._inner.recv(address, timeout_s)
        finally:
            self._turn.acquire()

    def end(self, timeout_s: float) -> None:
        self._turn.release()
        try:
            self._inner.end(timeout_s)
        finally:
            self._turn.acquire()

    def cut(self) -> None:
        self._inner.cut()


class Party:
    """Ranks as threads of this process, which take turns."""

    def __init__(
        self, spec: JobSpec, placement: StageAssignment,
        transports: Sequence[StageTransport] | None = None, *,
        fresh: bool = True, timeout_s: float = PATIENCE_S,
        sources: Sequence[DataSources] | None = None,
    ) -> None:  # fmt: skip
        size = max(placement.ranks) + 1
        if transports is None:
            post = LocalPost(size)
            transports = [LocalTransport(post, rank) for rank in range(size)]
        self._turn = threading.Lock()
        self._pool = ThreadPoolExecutor(size)
        self.runners = [
            build_stage_runner(
                spec,
                ALLOWED,
                placement,
                RankEndpoint(rank, TakingTurns(transport, self._turn), timeout_s),
                fresh=fresh,
                sources=None if sources is None else sources[rank],
            )
            for rank, transport in enumerate(transports)
        ]

    def each(self, act: Callable[[StageRunner], T]) -> list[T]:
        """What every rank answers; raises the first error, by rank."""

        def turn(runner: StageRunner) -> T:
            torch.set_num_threads(1)
            with self._turn:
                return act(runner)

        futures = [self._pool.submit(turn, runner) for runner in self.runners]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda each: isinstance(each, ExchangeError)):
            raise error  # the one that made the others lose a peer, if it is here
        return [future.result() for future in futures]

    def train(self, num_steps: int) -> list[float]:
        """The losses, which all ranks must agree on."""
        found = self.each(lambda runner: [runner.train_step().loss for _ in range(num_steps)])
        assert all(losses == found[0] for losses in found)
        return found[0]

    def state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Of all ranks together."""
        tensors: dict[str, Tensor] = {}
        metadata: dict[str, str] = {}
        for runner in self.runners:
            mine, words = runner.copy_state()
            assert not tensors.keys() & mine.keys()
            tensors |= mine
            metadata |= words
        return tensors, metadata

    def model(self) -> dict[str, Tensor]:
        return {
            name.removeprefix("model/"): tensor
            for name, tensor in self.state()[0].items()
            if name.startswith("model/")
        }


def cut(names: Sequence[str], *sizes: int) -> tuple[tuple[str, ...], ...]:
    """Names in portions of these sizes."""
    assert sum(sizes) == len(names)
    found, start = [], 0
    for size in sizes:
        found.append(tuple(names[start : start + size]))
        start += size
    return tuple(found)
