"""The step history of a client's part of a round: taken in while it trains, stored with its update.

A row of it is as wide as the worker says, which alone knows how many rows of data the client has.
"""

from stratagem.common.base.ids import Party, child_party
from stratagem.coordinator.core.effects import TrainClient
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.execute_plan import PlanListener
from stratagem.coordinator.effects.synchronous.segment_history import (
    TrainedSteps,
    parts_of,
    rows_of,
)
from stratagem.coordinator.observe.live_history import SegmentTail, TailKey
from stratagem.coordinator.store.journal.history_rows import HistoryRow
from stratagem.v1 import worker_pb2

MAX_STRIDE = 1 << 52
"""Steps in a row, of any number of steps that is counted exactly."""


def party_of(effect: TrainClient) -> Party:
    """Return the party that a client is: its session, and its history, have the name."""
    again = f"-{effect.attempt}" if effect.attempt else ""  # it masks another update
    return child_party(effect.party, f"client{effect.client}{again}")


class RecordedRound:
    """What a client has recorded in a round. Runs on the event loop."""

    def __init__(
        self, env: EffectContext, effect: TrainClient, request: worker_pb2.ExecuteRequest
    ) -> None:
        self._env, self._effect, self._request = env, effect, request
        recording = env.job_of(effect.run_id, effect.party).recording
        self._is_on = recording is not None and recording.client_steps
        self._key = TailKey(effect.run_id, party_of(effect), 0)
        self._stride = 0
        self._from_step = 0

    @property
    def listener(self) -> PlanListener:
        """What takes in the parts of the history."""
        return PlanListener(history=self._take_in if self._is_on else None)

    def _take_in(self, part: worker_pb2.HistoryPart) -> None:
        stride = int(part.stride)
        if part.party or not 0 < stride <= MAX_STRIDE or stride & (stride - 1):
            return  # no part of ours: the others are not whole without it
        self._stride, self._from_step = stride, int(part.from_step)
        begun = SegmentTail(self._effect.round_num, stride, self._effect.membership)
        self._env.history.add(self._key, begun, part)

    async def rows(self, result: worker_pb2.ClientRoundResult) -> list[HistoryRow]:
        """Return what is stored of the steps of an update."""
        effect = self._effect
        if not self._stride:
            return []
        parts = await parts_of(
            self._env, self._key, effect.round_num, effect.member, self._request, result
        )
        to_step = self._from_step + int(result.num_steps)
        of_round = (effect.round_num, self._stride, to_step)
        trained = TrainedSteps(effect.run_id, self._key.party, *of_round)
        return await rows_of(self._env, trained, parts)

    def end(self) -> None:
        """Forget what has been taken in: it is stored, or of a part of a round that is over."""
        if self._stride:
            self._env.history.end(self._key.run_id, self._key.party)
