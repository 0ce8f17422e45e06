"""The interface of the transports that carry the reducer's partial sums, and the transport of a
lone member, which carries nothing."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from stratagem.worker.exchange.buckets.shard_owners import StepPlan
from stratagem.worker.mesh.link import ExchangeError


class ReductionTransport(Protocol):
    """Turns every member's partial sums of each bucket into the sum, in set 0 of every member."""

    @property
    def name(self) -> str:
        """The engine's name for people: "solo", "shm", "gloo ring", ..."""

    def begin(
        self, number: int, step: StepPlan, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        """Starts a step. sets holds set 0 and every set with a partial sum of this member. The sums
        of all buckets but the last, the extras, are divided by divisor."""

    def launch(self, bucket: int) -> None:
        """Declares this member's partial sums of the bucket final. Called once per bucket, in
        order. Returns at once."""

    def finish(self) -> None:
        """Blocks until all sums are here and no peer reads this member's sets any more. Raises
        ExchangeError."""

    def cut(self) -> None:
        """Makes finish raise, soon and from any thread."""

    def close(self) -> None:
        """Frees threads and links. Nothing writes into the sets afterwards."""


class SoloTransport:
    """The transport of a lone member, whose partial sum is the sum."""

    name = "solo"

    def __init__(self) -> None:
        self._sums: Sequence[Tensor] = ()
        self._divisor: float | None = None
        self._is_cut = False

    def begin(
        self, number: int, step: StepPlan, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        self._sums, self._divisor = sets[0], divisor

    def launch(self, bucket: int) -> None: ...

    def finish(self) -> None:
        if self._is_cut:
            raise ExchangeError("the exchange was cut")
        if self._divisor is not None:
            for total in self._sums[:-1]:
                total.div_(self._divisor)

    def gather_norms(self, own: Tensor) -> list[Tensor]:
        """See `SliceTransport`: a lone member owns everything."""
        return [own]

    def open_sums(self) -> Sequence[Tensor]:
        """See `SliceTransport`: there is no member before this one."""
        return self._sums

    def open_slices(self) -> Sequence[Sequence[Tensor]]:
        """See `SliceTransport`."""
        return [self._sums]

    def close_slices(self) -> None:
        """See `SliceTransport`."""

    def cut(self) -> None:
        self._is_cut = True

    def close(self) -> None: ...
