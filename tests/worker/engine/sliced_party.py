"""Members of one process, each with its slice of the optimizer's state, that train together."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.common.numerics.shards import assign_shards
from stratagem.common.tensors.files import blob_digest
from stratagem.common.tensors.manifest import DEFAULT_LIMITS, Manifest, Purpose
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.coordinator.updates.merge import are_sliced, joined_slices
from stratagem.worker.engine import StepReport, Trainer, build_trainer
from stratagem.worker.engine.slices import StateShare
from stratagem.worker.exchange import ExchangeError, GradientReducer, sliced_exchange
from stratagem.worker.mesh import Link
from stratagem.worker.mesh.shm import SharedGroup
from tests.patience import PATIENCE_S
from tests.worker.engine.support import ALLOWED, CPU
from tests.worker.mesh.engines import links_of

T = TypeVar("T")
State = tuple[dict[str, Tensor], dict[str, str]]


class SlicedParty:
    """All members of a party. links: by rank; None for a lone member."""

    def __init__(
        self,
        spec: JobSpec,
        links: list[Link | SharedGroup | None],
        num_shards: int,
        *,
        is_mirrored: bool = False,
        is_full: bool = False,
    ) -> None:
        self.size, self.num_shards = len(links), num_shards
        shares = [StateShare(rank, self.size, is_mirrored, is_full) for rank in range(self.size)]
        self.trainers = [
            build_trainer(spec, ALLOWED, share, device=CPU, fresh=True) for share in shares
        ]
        self._pool = ThreadPoolExecutor(self.size)
        self.exchanges: list[GradientReducer] = self.all(lambda rank: self._exchange(rank, links))

    def _exchange(self, rank: int, links: list[Link | SharedGroup | None]) -> GradientReducer:
        trainer = self.trainers[rank]
        assert trainer.pieces is not None
        exchange = sliced_exchange(
            trainer.buckets,
            links[rank],
            self.num_shards,
            trainer.pieces.owners,
            is_mirrored=trainer.pieces.is_mirrored,
            held=trainer.pieces.held,
            deadline_s=PATIENCE_S,
        )
        trainer.connect(exchange)
        return exchange

    def all(self, call: Callable[[int], T]) -> list[T]:
        """What each member makes of a call with its rank, all at once."""
        return list(self._pool.map(call, range(self.size)))

    def step(self) -> list[StepReport]:
        """One step; the report of each member."""
        shards = assign_shards(self.num_shards, self.size)

        def take(rank: int) -> StepReport:
            return self.trainers[rank].train_step(
                self.exchanges[rank], shards[rank], self.num_shards
            )

        return self.all(take)

    def digest(self) -> str:
        """Of the blob that the coordinator would make of the members' states."""
        copies = [t.copy_state(is_first=rank == 0) for rank, t in enumerate(self.trainers)]
        return digest_of(copies)

    def close(self) -> None:
        self.all(lambda rank: self.exchanges[rank].close())
        self._pool.shutdown()


def step_without_norms(party: SlicedParty, rank: int) -> list[StepReport | None]:
    """A step of which one member does not hear the norms; None for each that it failed for."""
    transport = party.exchanges[rank].slices
    assert transport is not None
    gather = transport.gather_norms

    def lose(*arguments: Any) -> Any:
        gather(*arguments)
        party.exchanges[rank].cut()
        raise ExchangeError("gone")

    object.__setattr__(transport, "gather_norms", lose)
    shards = assign_shards(party.num_shards, party.size)

    def step(rank: int) -> StepReport | None:
        exchange = party.exchanges[rank]
        try:
            return party.trainers[rank].train_step(exchange, shards[rank], party.num_shards)
        except ExchangeError:
            return None

    return party.all(step)


def told(report: StepReport) -> tuple[object, ...]:
    """What all members say alike of a step."""
    return (
        report.step,
        report.loss,
        report.weight,
        report.grad_norm,
        report.num_skipped,
        dict(report.learning_rates),
    )


def digest_of(states: list[State]) -> str:
    """Of the blob that is made of these parts of one state."""
    made = [manifest_of(tensors, Purpose.STATE, metadata=texts) for tensors, texts in states]
    manifests = [manifest for manifest, _ in made]
    if not are_sliced(manifests):
        (manifest, buffers), *others = made
        assert not others
        return blob_digest(manifest, buffers)
    whole = joined_slices(manifests, DEFAULT_LIMITS)
    parts = [b"".join(bytes(buffer) for buffer in buffers) for _, buffers in made]
    return blob_digest(whole.manifest, _pieces(whole.manifest, whole.sources, parts))


def _pieces(manifest: Manifest, sources: object, parts: list[bytes]) -> Iterator[bytes]:
    assert isinstance(sources, dict)
    for target in manifest.stored():
        for number, spec in sources[target.name]:
            yield parts[number][spec.offset : spec.offset + spec.size_bytes]


@contextmanager
def links_over(engine: str, size: int) -> Iterator[list[Link | SharedGroup | None]]:
    """Links of all members of this process: "shm" or "grpc"."""
    if size == 1:
        yield [None]
        return
    with links_of(engine, size) as links:
        yield [*links]


@contextmanager
def sliced_party(
    spec: JobSpec,
    links: list[Link | SharedGroup | None],
    num_shards: int,
    *,
    is_mirrored: bool = False,
    is_full: bool = False,
) -> Iterator[SlicedParty]:
    party = SlicedParty(spec, links, num_shards, is_mirrored=is_mirrored, is_full=is_full)
    try:
        yield party
    finally:
        party.close()


def replicated(trainer: Trainer) -> str:
    """The digest of the state of a trainer that keeps all of it."""
    return digest_of([trainer.copy_state()])
