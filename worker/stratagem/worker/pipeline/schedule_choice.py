"""Choice of the schedule that the ranks of a pipeline follow, also where "auto" leaves it open.

Owns the proof that a schedule ends, before anything is computed by it. Must not know tensors.
"""

import structlog
import torch

from stratagem.common.pipeline.schedules import Schedule, choose, has_eager, suited
from stratagem.common.pipeline.simulation import check
from stratagem.common.strategy.choices import AUTO
from stratagem.worker.pipeline.hop_measurement import Meter, measure_hops
from stratagem.worker.pipeline.rank_pass import StageChannel

log = structlog.get_logger(__name__)


class Schedules:
    """The schedules of one rank; all ranks come to the same."""

    def __init__(
        self, asked: str, lane: StageChannel, device: torch.device, *, is_pipelined: bool
    ) -> None:
        """asked: a name, or "auto". is_pipelined: a step has more than one micro-batch."""
        self._asked, self._lane = asked, lane
        self.name = "1f1b" if asked == AUTO else asked
        """Of the schedule in use."""
        is_open = asked == AUTO and is_pipelined and has_eager(lane.rank_of)
        self.meter = Meter(device) if is_open else None
        """While it is not decided what "auto" stands for."""
        self._made: dict[int, Schedule] = {}

    def __str__(self) -> str:
        return f"{self.name} (auto)" if self._asked == AUTO else self.name

    def of(self, num_micro_batches: int) -> Schedule:
        """Returns the action lists of all ranks for a step of so many micro-batches, proven to
        end."""
        if num_micro_batches not in self._made:
            lane = self._lane
            made = choose(self.name, lane.rank_of, num_micro_batches)
            check(made, lane.rank_of, num_micro_batches, lane.plan.dependencies())
            self._made[num_micro_batches] = made
        return self._made[num_micro_batches]

    @property
    def can_settle(self) -> bool:
        """True if a step of more than one micro-batch was measured, for "auto"."""
        return self.meter is not None and self.meter.num_micro_batches >= 2

    def settle(self, number: int) -> None:
        """Decides what "auto" stands for. number: of the pass in which hops are measured."""
        assert self.meter is not None
        hops = measure_hops(self._lane, number, self.meter)
        self.meter, self.name = None, suited(hops.hop_s, hops.compute_s)
        self._made.clear()
        log.info(
            "schedule chosen",
            schedule=self.name,
            hop_ms=round(1e3 * hops.hop_s, 3),
            compute_ms=round(1e3 * hops.compute_s, 3),
        )
