"""The sending of a step history in numbered parts, and the series that several plans have."""

import hashlib
import time
from typing import Final

from stratagem.common.history import Recorder, Series
from stratagem.common.history.recording import packed_parts
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.session.context import ExecutionContext

SEND_INTERVAL_S: Final = 0.5

LOSS: Final = Series("train.loss")
GRAD_NORM: Final = Series("train.grad_norm")
WALL: Final = Series("time.wall_s", observed=True)
ROWS_PER_S: Final = Series("time.rows_per_s", observed=True)


class SentParts:
    """Parts of the step history of one execution, as they are sent. Used by the torch thread."""

    def __init__(self, work: ExecutionContext, stride: int = 0) -> None:
        """stride: where the coordinator does not know it."""
        self._work, self._stride = work, stride
        self._sent_s = -SEND_INTERVAL_S
        self._sha256 = hashlib.sha256()
        self.num_parts = 0
        work.post(work.outbox.restart_history)

    @property
    def digest(self) -> str:
        """Of all rows that were sent."""
        return self._sha256.hexdigest()

    def are_due(self) -> bool:
        """Return whether it is time to send what is complete; then the next time is later."""
        now_s = time.monotonic()
        if now_s - self._sent_s < SEND_INTERVAL_S:
            return False
        self._sent_s = now_s
        return True

    def send(self, party: str, recorder: Recorder, *, is_end: bool) -> None:
        """Send the rows of a part of the party that are complete; at the end all."""
        for packed in packed_parts(recorder.end() if is_end else recorder.take()):
            part = pb.HistoryPart(
                number=self.num_parts,
                from_step=recorder.from_step,
                rows=packed,
                party=party,
                stride=self._stride,
            )
            self._sha256.update(packed)
            self.num_parts += 1
            self._work.post(self._work.outbox.add_history, part)

    def say_what_is_left_out(self, recorder: Recorder) -> None:
        """Name series that are not recorded in the run's log, once."""
        if recorder.dropped:
            names, num = ", ".join(sorted(recorder.dropped)[:5]), len(recorder.dropped)
            self._work.warn([f"the step history leaves out {num} series, such as {names}"])
            recorder.dropped.clear()
