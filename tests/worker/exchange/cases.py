"""Gradients with known values, what their sum must be, and the steps of members."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from stratagem.common.numerics.shards import Node, tree_sum
from stratagem.worker.exchange import GradientBuckets, GradientReducer, StepScalars, mesh_exchange
from stratagem.worker.exchange import all_reduce as all_reduce_schedule
from stratagem.worker.exchange.transports import num_scalars
from stratagem.worker.mesh import Link
from stratagem.worker.mesh.link import PendingTransfer
from stratagem.worker.mesh.shm import SharedGroup
from tests.patience import PATIENCE_S

torch.set_num_threads(1)  # in the processes of a party, too

ODD = (0, 1, 7, 180_003, 64, 100_000)
"""Two buckets."""
SMALL = (0, 1, 7, 3_003)

WAYS = {
    "": (all_reduce_schedule.SMALL_BYTES, all_reduce_schedule.MAX_GATHER_MEMBERS),
    "direct": (0, 0),
    "gather": (2**60, 2**60),
    "tree": (2**60, 0),
}


@dataclass(frozen=True)
class Case:
    num_shards: int
    num_live: int
    sizes: tuple[int, ...] = ODD
    dtype: torch.dtype = torch.float32
    num_rest: int = 3
    divisor: float | None = None
    piece_bytes: int = all_reduce_schedule.PIECE_BYTES
    way: str = ""
    """The one way that all buckets take; by size and members unless given."""
    device: str = "cpu"

    def configure(self) -> None:
        """Sets the thresholds of this process."""
        all_reduce_schedule.PIECE_BYTES = self.piece_bytes
        all_reduce_schedule.SMALL_BYTES, all_reduce_schedule.MAX_GATHER_MEMBERS = WAYS[self.way]

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def gradient(self, shard: int, index: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 100 * shard + index)
        return torch.randn(self.sizes[index], generator=generator).to(self.dtype)

    @property
    def num_extras(self) -> int:
        return num_scalars(len(self.sizes), self.num_rest)

    def extras(self, shard: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 100 * shard + 99)
        return torch.randn(self.num_extras, generator=generator, dtype=torch.float64)

    def scalars(self, shard: int, step: int) -> StepScalars:
        return StepScalars.of(self.extras(shard, step), len(self.sizes))

    def expected(self, step: int) -> list[bytes]:
        """Every gradient and the extras, added in one process."""

        def total(value: Callable[[int], Tensor]) -> Tensor:
            leaves = {Node(s, s + 1): value(s) for s in range(self.num_live)}
            return tree_sum(leaves, self.num_live, lambda a, b: a + b)

        sums = [total(partial(self._wide, i, step)) for i in range(len(self.sizes))]
        sums = [(s if self.divisor is None else s / self.divisor).to(self.dtype) for s in sums]
        return [raw(t) for t in [*sums, total(lambda s: self.extras(s, step))]]

    def _wide(self, index: int, step: int, shard: int) -> Tensor:
        return self.gradient(shard, index, step).to(self.wide)

    def make_buckets(self) -> tuple[list[nn.Parameter], GradientBuckets]:
        params = [
            nn.Parameter(torch.ones(n, dtype=self.dtype, device=self.device)) for n in self.sizes
        ]
        named = [(f"p{i}", p) for i, p in enumerate(params)]
        return params, GradientBuckets(named, num_extras=self.num_extras)


def buckets_of(params: list[tuple[str, nn.Parameter]]) -> GradientBuckets:
    """Buckets with room for scalars without a rest."""
    return GradientBuckets(params, num_extras=num_scalars(len(params), 0))


def no_scalars(buckets: GradientBuckets) -> StepScalars:
    """Zeros."""
    flat = torch.zeros(buckets.num_extras, dtype=torch.float64)
    return StepScalars.of(flat, len(buckets.layout.slots))


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def compute(exchange: GradientReducer, params: list[nn.Parameter], case: Case, step: int) -> None:
    """All of a step but its end."""
    exchange.begin_step(step, exchange.party.owned, case.num_live, divisor=case.divisor)
    for shard in exchange.party.owned:
        if shard < case.num_live:
            exchange.begin_shard(shard)
            grads = [case.gradient(shard, i, step).to(case.device) for i in range(len(params))]
            terms = [(p * grad).sum() for p, grad in zip(params, grads, strict=True)]
            torch.stack(terms).sum().backward()
            exchange.end_shard(shard, case.scalars(shard, step))


def one_step(
    exchange: GradientReducer, params: list[nn.Parameter], case: Case, step: int
) -> list[bytes]:
    compute(exchange, params, case, step)
    extras = exchange.finish().flat()
    grads = []
    for p in params:
        assert p.grad is not None
        grads.append(raw(p.grad))
    return [*grads, raw(extras)]


Exchange = tuple[list[nn.Parameter], GradientReducer]


def exchanges_of(
    links: Sequence[Link | SharedGroup],
    case: Case,
    all_reduce: str = "direct",
    deadline_s: float = PATIENCE_S,
) -> list[Exchange]:
    """Those of all members of this process."""

    def connect(link: Link | SharedGroup) -> Exchange:
        params, buckets = case.make_buckets()
        settings = {"all_reduce": all_reduce, "deadline_s": deadline_s}
        return params, mesh_exchange(buckets, link, case.num_shards, **settings)  # type: ignore[arg-type]

    with ThreadPoolExecutor(len(links)) as pool:
        return [*pool.map(connect, links)]


def sums_of(
    links: Sequence[Link | SharedGroup],
    case: Case,
    steps: Iterable[int],
    all_reduce: str = "direct",
) -> list[list[list[bytes]]]:
    """What each member, in a thread of its own, has after each of some steps."""
    made, numbers = exchanges_of(links, case, all_reduce), [*steps]

    def run(one: Exchange) -> list[list[bytes]]:
        params, exchange = one
        return [one_step(exchange, params, case, step) for step in numbers]

    with ThreadPoolExecutor(len(links)) as pool:
        sums = [*pool.map(run, made)]
    for _, exchange in made:
        exchange.close()
    return sums


class CountingLink:
    """A link that adds up what is sent over it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.rank, self.size = link.rank, link.size
        self.name, self.in_order = link.name, link.in_order
        self.recv, self.cut, self.close = link.recv, link.cut, link.close
        self.num_sent, self.num_bytes = 0, 0

    def send(self, peer: int, tag: int, tensor: Tensor) -> PendingTransfer:
        self.num_sent += tensor.numel()
        self.num_bytes += tensor.nbytes
        return self.link.send(peer, tag, tensor)
