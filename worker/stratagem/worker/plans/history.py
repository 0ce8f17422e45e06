"""Record the step history of one segment on one member, and send it in parts.

Every member records the common numbers, so that any of them can continue the record of another; the
first member of the party sends them. Each member also records and sends the numbers that only it
knows, about its nodes or stages and itself. Sending begins with the segment's first step whenever a
view begins, since the earlier sender and its parts may be lost.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from stratagem.common.history import Recorder, Series, stride_of
from stratagem.common.history.recording import packed_parts
from stratagem.common.strategy import Federated, are_models_apart
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine import StepReport
from stratagem.worker.engine.forward_backward import means
from stratagem.worker.engine.reports import PartReport
from stratagem.worker.federated.client_trainer import ClientStep
from stratagem.worker.host.blobs import memory_bytes
from stratagem.worker.phases import TrainingPhase
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.control import MemberView

# ---- History of a segment ----

_PREDICTED: Final = Series("train.loss.predicted")
_WAIT: Final = Series("time.exchange_wait_s", observed=True)


class StepHistory:
    """Records and sends a segment's step history under one membership view. Torch thread only."""

    def __init__(
        self, work: ExecutionContext, plan: pb.TrainPlan, view: MemberView, step: int
    ) -> None:
        """Begin to record. step: the number of applied steps."""
        self._work, self._stride = work, int(plan.history_stride)
        self._before = int(plan.history_from_step)
        """Number of steps in the history before those of this plan."""
        self._is_first = view.rank == 0
        self._is_shared = not are_models_apart(work.job.strategy)
        """True if all members know the same numbers of a step, unlike nodes and replicas."""
        num_ranks = len(set(plan.ranks))
        self._has_parts = not num_ranks or view.rank < num_ranks
        """True if this member's stages are recorded: only those of the first pipeline are."""
        recording = work.job.recording
        self._observes = recording is None or recording.observed
        self._series: dict[str, Series] = {}
        self._newest: StepReport | None = None
        """The report of the latest step under this view."""
        of_worker = f"worker.{work.host.worker_id}"
        self._busy, self._wait, self._memory = (
            Series(f"{of_worker}.{name}", observed=True)
            for name in ("busy_s", "wait_s", "memory_bytes")
        )
        holding = work.holding
        if not self._stride:
            holding.recorder, holding.own_recorders = None, {}
            return
        if holding.recorder is None or holding.recorder.stride != self._stride:
            holding.recorder, holding.own_recorders = (
                Recorder(self._stride, self._before + step),
                {},
            )
        for recorder in (holding.recorder, *holding.own_recorders.values()):
            recorder.rewind()
        self._parts = SentParts(work)

    def add(self, report: StepReport, seconds: float) -> None:
        """Record an applied step and its duration; send complete rows at intervals."""
        recorder = self._work.holding.recorder
        if recorder is None:
            return
        if report.answered:
            # they belong to the previous step that on_step was shown, the last exact one
            latest = self._work.holding.tally.latest
            step = int(latest["step"]) if latest else report.step - 1
            recorder.add(self._before + step, self._logged(report.answered))
        recorder.add(self._before + report.step, self._values(report, seconds))
        self._newest = report
        is_due = self._parts.are_due()
        self._add_own(report, seconds, with_memory=is_due)
        if is_due:
            self._send(is_end=False)

    def end(self, measured: Mapping[str, float]) -> tuple[int, str]:
        """Send all remaining rows, also those that the next segment continues; return the number of
        parts, and their digest. measured: final values of all nodes together, by series."""
        holding = self._work.holding
        recorder = holding.recorder
        if recorder is None:
            return 0, ""
        if holding.answer.logged and self._is_first:
            # those of the last step, which the others have not received
            recorder.add(self._before + holding.shown_step, self._logged(holding.answer.logged))
        if measured:
            recorder.add(self._before + (holding.applied_step or 0), self._named_values(measured))
        self._add_actions()
        self._send(is_end=True)
        for _, sent_recorder in self._sent_recorders():
            self._parts.say_what_is_left_out(sent_recorder)
        return self._parts.num_parts, self._parts.digest

    def _logged(self, logged: Mapping[str, float]) -> Iterator[tuple[Series, float]]:
        for name, value in logged.items():
            yield self._named(f"train.{name}"), value

    def _values(self, report: StepReport, seconds: float) -> Iterator[tuple[Series, float]]:
        """Yield the numbers that all members know, and times measured by the first member."""
        if self._is_shared:
            is_predicted = report.phase == TrainingPhase.PREDICT
            yield _PREDICTED if is_predicted else LOSS, report.loss
            yield GRAD_NORM, report.grad_norm
            for name, rate in report.learning_rates.items():
                yield self._named(name), rate
            if report.logged:
                yield from self._logged(means(report.logged))
        if report.measured:
            yield from self._named_values(report.measured)
        if self._observes:
            yield WALL, time.time()
            yield ROWS_PER_S, report.num_rows / max(seconds, 1e-9)
            yield _WAIT, report.exchange_wait_s

    def _add_own(self, report: StepReport, seconds: float, *, with_memory: bool) -> None:
        """Record the numbers of a step that only this member knows."""
        memory = {}
        if with_memory and self._observes:
            memory["memory_bytes"] = float(memory_bytes(self._work.host.device))
        if self._observes:
            waited_s = report.exchange_wait_s
            numbers = [(self._busy, max(seconds - waited_s, 0.0)), (self._wait, waited_s)]
            if memory:
                numbers.append((self._memory, memory["memory_bytes"]))
            self._record("", report.step, numbers)
        for part in report.parts if self._has_parts else ():
            self._record(part.party, report.step, self._of_part(part, memory))

    def _add_actions(self) -> None:
        """Record the timelines of this member's stages in the last step."""
        newest = self._newest
        if newest is None or not self._has_parts or not self._observes:
            return
        for part in newest.actions():
            self._record(part.party, newest.step, self._of_part(part, {}))

    def _of_part(
        self, part: PartReport, memory: Mapping[str, float]
    ) -> Iterator[tuple[Series, float]]:
        yield from self._named_values(part.exact)
        if self._observes and part.observed:
            yield from self._named_values({**part.observed, **memory}, observed=True)

    def _record(self, party: str, step: int, values: Iterable[tuple[Series, float]]) -> None:
        recorders = self._work.holding.own_recorders
        if party not in recorders:
            recorders[party] = Recorder(self._stride, self._before + step - 1)
        recorders[party].add(self._before + step, values)

    def _named_values(
        self, values: Mapping[str, float], *, observed: bool = False
    ) -> Iterator[tuple[Series, float]]:
        for name, value in values.items():
            yield self._named(name, observed=observed), value

    def _named(self, name: str, *, observed: bool = False) -> Series:
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = Series(name, observed)
        return series

    def _sent_recorders(self) -> Iterator[tuple[str, Recorder]]:
        """Yield (part of the party, recorder) for each recorder that this member sends."""
        holding = self._work.holding
        if self._is_first and holding.recorder is not None:
            yield "", holding.recorder
        yield from holding.own_recorders.items()

    def _send(self, *, is_end: bool) -> None:
        for party, recorder in self._sent_recorders():
            self._parts.send(party, recorder, is_end=is_end)


# ---- History of a client's round ----
#
# A client begins each round anew, on any worker. So its steps are numbered as if it took part in
# all rounds: (r - 1) times the steps of one round come before those of round r.


class ClientHistory:
    """Records and sends the steps of a client in a round, if the job asks for it. For the torch
    thread."""

    def __init__(self, work: ExecutionContext, num_steps: int | None) -> None:
        """Begin to record. num_steps: the number of steps of a round; None: not known in
        advance."""
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
        """Record a step; send complete rows, at intervals."""
        if self._recorder is None:
            return
        self._recorder.add(self._before + step.number, self._values(step))
        if self._parts.are_due():
            self._parts.send("", self._recorder, is_end=False)

    def end(self) -> tuple[int, str]:
        """Send all remaining rows; return the number of parts, and their digest."""
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


# ---- Numbered parts ----

SEND_INTERVAL_S: Final = 0.5

LOSS: Final = Series("train.loss")
GRAD_NORM: Final = Series("train.grad_norm")
WALL: Final = Series("time.wall_s", observed=True)
ROWS_PER_S: Final = Series("time.rows_per_s", observed=True)


class SentParts:
    """Sends the step history of one execution in parts. Used by the torch thread."""

    def __init__(self, work: ExecutionContext, stride: int = 0) -> None:
        """Begin without sent parts. stride: the number of steps per row of the history, if the
        coordinator does not know it."""
        self._work, self._stride = work, stride
        self._sent_s = -SEND_INTERVAL_S
        self._sha256 = hashlib.sha256()
        self.num_parts = 0
        work.post(work.outbox.restart_history)

    @property
    def digest(self) -> str:
        """The SHA-256 of all rows sent so far."""
        return self._sha256.hexdigest()

    def are_due(self) -> bool:
        """Return whether complete rows are to be sent now; if so, set the next time."""
        now_s = time.monotonic()
        if now_s - self._sent_s < SEND_INTERVAL_S:
            return False
        self._sent_s = now_s
        return True

    def send(self, party: str, recorder: Recorder, *, is_end: bool) -> None:
        """Send the complete rows of a part of the party; is_end: all rows."""
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
        """Log once which series are left out of the history."""
        if recorder.dropped:
            names, num = ", ".join(sorted(recorder.dropped)[:5]), len(recorder.dropped)
            self._work.warn([f"the step history leaves out {num} series, such as {names}"])
            recorder.dropped.clear()
