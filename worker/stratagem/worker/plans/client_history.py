"""The step history of one round of a federated client: what is recorded of its steps.

A client begins each round anew, on any worker. So its steps count as if it took part in all rounds:
before those of round r there are r - 1 times the steps of one round.
"""

import time
from collections.abc import Iterator

from stratagem.common.history import Recorder, Series, stride_of
from stratagem.common.strategy import Federated
from stratagem.worker.engine.step.logged_sums import means
from stratagem.worker.engine.trainers.federated_client import ClientStep
from stratagem.worker.plans.sent_parts import GRAD_NORM, LOSS, ROWS_PER_S, WALL, SentParts
from stratagem.worker.session.context import ExecutionContext


class ClientHistory:
    """Records the steps of a client in a round, where the job asks for it. Used by the torch
    thread."""

    def __init__(self, work: ExecutionContext, num_steps: int | None) -> None:
        """num_steps: of one round of the client; None where that is not known before."""
        recording, strategy = work.job.recording, work.job.strategy
        self._recorder: Recorder | None = None
        self._observes = recording is not None and recording.observed
        if recording is None or not recording.client_steps or not isinstance(strategy, Federated):
            return
        if num_steps is None:
            text = "recording.client_steps: the rows come as a stream, so steps cannot be counted"
            work.warn([text])
            return
        self._before = (work.segment - 1) * num_steps
        self._recorder = Recorder(stride_of(strategy.rounds * num_steps), self._before)
        self._parts = SentParts(work, self._recorder.stride)
        self._step_ended_s = time.perf_counter()

    def add(self, step: ClientStep) -> None:
        """Record a step; send what is complete, at intervals."""
        if self._recorder is None:
            return
        self._recorder.add(self._before + step.number, self._values(step))
        if self._parts.are_due():
            self._parts.send("", self._recorder, is_end=False)

    def end(self) -> tuple[int, str]:
        """Send all that is left; return how many parts there are, and their digest."""
        if self._recorder is None:
            return 0, ""
        self._parts.send("", self._recorder, is_end=True)
        self._parts.say_what_is_left_out(self._recorder)
        return self._parts.num_parts, self._parts.digest

    def _values(self, step: ClientStep) -> Iterator[tuple[Series, float]]:
        report = step.report
        yield LOSS, report.counted.loss
        yield GRAD_NORM, report.grad_norm
        for name, rate in report.learning_rates.items():
            yield Series(name), rate
        for name, value in {**means(report.counted.logged), **step.shown}.items():
            yield Series(f"train.{name}"), value
        if self._observes:
            now_s = time.perf_counter()
            seconds, self._step_ended_s = now_s - self._step_ended_s, now_s
            yield WALL, time.time()
            yield ROWS_PER_S, step.num_rows / max(seconds, 1e-9)
