"""Update a model that all members of a party share: one synchronous step, or one turn of it.

A member computes the gradients of its own shards, passes them to an exchange, and applies the sum.
Parameters change only after the exchange is complete, so an update that fails leaves no trace. The
module knows neither gRPC nor members nor the coordinator.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from stratagem.common.base.errors import UserCodeError
from stratagem.common.numerics.keys import Key
from stratagem.common.numerics.shards import split_rows
from stratagem.common.process.failpoints import failpoint
from stratagem.worker.engine.apply_step import (
    Applied,
    StepPolicy,
    StepSummary,
    after_hook,
    apply_step,
    learning_rate_factor,
    summarize,
)
from stratagem.worker.engine.buffers import Buffers
from stratagem.worker.engine.callbacks import AnswerExtras, Callbacks, StepAnswer, wish_of
from stratagem.worker.engine.forward_backward import (
    NUM_EXTRAS,
    Counted,
    LoggedSums,
    Window,
    packed,
    unpacked,
)
from stratagem.worker.engine.reports import StepReport, end_of
from stratagem.worker.engine.setup import Batch, Setup, TrainingRows
from stratagem.worker.engine.slices import OptimizerPieces, StepInDoubt
from stratagem.worker.engine.state import State
from stratagem.worker.engine.state_format import checksum
from stratagem.worker.engine.turns import NamedParams, StepTurn
from stratagem.worker.exchange.compressor import Compressor
from stratagem.worker.exchange.layout import parts_of, total_norm
from stratagem.worker.exchange.reducer import Reducer
from stratagem.worker.exchange.transports import END, ParameterTransport, StepScalars
from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.numerics.precision import LossScale
from stratagem.worker.phases import PassTimer, PhaseTraining, TrainingPhase

# ---- Extras of a step ----
#
# The extras travel beside the gradients and are added up with them, shard by shard: changes of the
# buffers, the values that the step logs, the answer of `on_step`, and a checksum. Only `StepExtras`
# knows their order.


class StepExtras:
    """One member's extras of each step. Used by one thread."""

    def __init__(
        self,
        buffers: Buffers,
        callbacks: Callbacks,
        phases: PhaseTraining | None,
        *,
        may_log: bool,
    ) -> None:
        self._buffers, self._may_log = buffers, may_log
        self._first_logged = buffers.num_elements
        self._end_logged = self._first_logged + (NUM_EXTRAS if may_log else 0)
        self._answers = AnswerExtras(callbacks, self._end_logged)
        self._replicas = ReplicaCheck(phases)
        self.num_elements = self._end_logged + self._answers.num_extras + self._replicas.num_extras

    def begin_step(self, state: Callable[[], State]) -> None:
        """Begins an exact step in this state."""
        self._replicas.begin_step(state)

    def of_shard(self, shard: int, num_live: int, logged: LoggedSums, answer: StepAnswer) -> Tensor:
        """Returns the extras of a shard after its passes; 1-d float64."""
        extras = self._buffers.contribution(shard, num_live)
        if self._may_log:
            extras = torch.cat([extras, packed(logged)])
        extras = self._answers.appended(extras, shard, answer)
        return self._replicas.with_checksum(extras)

    def compare(self, total: Tensor, num_live: int, step: int) -> None:
        """Raises unless all members began the step with the same state, where that is checked."""
        self._replicas.compare(total, num_live, step)

    def logged(self, total: Tensor, own: LoggedSums | None) -> LoggedSums:
        """Returns what all shards have logged. own: what one of this member's has, if it has any;
        raises UserCodeError unless all have the same names."""
        if not self._may_log:
            return {}
        names = None if own is None else tuple(own)
        return unpacked(total[self._first_logged : self._end_logged], names)

    def answered(self, total: Tensor) -> dict[str, float]:
        """Returns what on_step has logged of the step before."""
        return self._answers.taken(total)


# ---- Shared step ----


class Share(NamedTuple):
    """What this member has of a step: its shards, and its wishes."""

    exchange: Reducer
    owned: range
    num_shards: int
    stop: bool
    answer: StepAnswer


class _Sums(NamedTuple):
    """The sums over all live shards, which are in `.grad`, too."""

    scalars: StepScalars
    num_live: int
    logged: LoggedSums
    wait_s: float


@dataclass(frozen=True, slots=True)
class SharedStep:
    """Makes updates of one model. Used by one thread."""

    setup: Setup
    params: NamedParams
    """All that are trained, in whatever turn: the exchange carries all of them."""
    rows: TrainingRows
    buffers: Buffers
    extras: StepExtras
    compressor: Compressor | None
    phases: PhaseTraining | None
    timer: PassTimer
    pieces: OptimizerPieces | None = None
    """What this member updates, where each updates its own slice of all parameters."""

    def run(self, turn: StepTurn, num_turns: int, batch: Batch, share: Share) -> StepReport:
        """Makes the update of a turn, of `num_turns` in each step, over the batch."""
        exchange = share.exchange
        self.buffers.snapshot()
        self.setup.execution.begin_batch(batch.num_rows)
        divisor = self._divisor(turn, batch.num_rows)
        must_weigh = divisor is None and self.rows.window.must_divide
        number = batch.step * num_turns + (turn.number or 0) + 1
        try:
            sums = self._sums(turn, number, batch, share, divisor, must_weigh=must_weigh)
        except BaseException:
            # The step will be done again, perhaps with other members: forget all of it.
            exchange.discard()
            self.buffers.restore()
            raise
        finally:
            turn.passes.randomness.end()
        if sums.scalars.stop >= END:
            exchange.discard()
            self.buffers.restore()
            return end_of(batch.step)
        failpoint("worker.step.before_apply")
        return self._apply(turn, batch, exchange, sums, must_divide=must_weigh)

    def predict(self, turn: StepTurn, step: int, phases: PhaseTraining) -> StepReport:
        """Makes an update, after `step` others, with a gradient that every member predicts for
        itself, from the same history to the same bits."""
        phase, predicted = phases.phase, phases.predict()
        for (_, param), gradient in zip(self.params, predicted, strict=True):
            param.grad = gradient
        grads = [gradient for gradient in predicted if gradient is not None]
        summary = summarize(phases.last_loss, 1.0, grads, self.setup.numerics)
        # There was no forward pass, and no loss that was scaled.
        execution = replace(self.setup.execution, scale=LossScale(is_dynamic=False))
        policy = replace(turn.policy, execution=execution, buffers=None)
        is_applied, learning_rates = self._update(step, summary, policy)
        phases.end_predicted()
        return StepReport(
            step=step + 1,
            loss=summary.loss,
            weight=0.0,
            num_rows=0,
            stop=False,
            grad_norm=summary.norm.item(),
            num_skipped=int(not is_applied),
            phase=phase,
            learning_rates=learning_rates,
            news=phases.take_news(),
        )

    def key(self, turn: StepTurn, step: int, shard: int, micro_batch: int) -> Key:
        """Returns what a micro-batch's random numbers depend on."""
        return (self.setup.job.seed, step, *turn.key, shard, micro_batch)

    def _divisor(self, turn: StepTurn, num_rows: int) -> float | None:
        """Returns the divisor of the sums if known before the step; gradients then come divided.

        None where it depends on the weights, or where nothing is divided.
        """
        scale = self.setup.execution.scale
        if not self.rows.window.must_divide:
            return scale.value if scale.is_dynamic else None
        return num_rows * scale.value if turn.passes.objective.counts_rows else None

    def _sums(
        self,
        turn: StepTurn,
        number: int,
        batch: Batch,
        share: Share,
        divisor: float | None,
        *,
        must_weigh: bool,
    ) -> _Sums:
        """Computes the own shards, and waits for the sums of all. number: of the exchange, from 1.
        must_weigh: the divisor is not known before."""
        exchange, owned = share.exchange, share.owned
        live = split_rows(batch.num_rows, min(share.num_shards, batch.num_rows))
        wish = wish_of(share.answer, stop=share.stop)
        own_logged: LoggedSums | None = None
        exchange.begin_step(number, owned, len(live), divisor=divisor)
        for shard in range(owned.start, min(owned.stop, len(live))):
            if shard > owned.start:
                self.buffers.restore()
            counted = self._run_shard(turn, exchange, batch, shard, live[shard], must_weigh)
            own_logged = counted.logged
            rest = self.extras.of_shard(shard, len(live), counted.logged, share.answer)
            scalars = StepScalars(counted.weight, counted.loss_sum, wish, exchange.reached(), rest)
            exchange.end_shard(shard, scalars)
        waits_since_s = time.perf_counter()
        if exchange.parameters is not None:
            exchange.parameters.end_passes()
        sums = exchange.finish()
        wait_s = time.perf_counter() - waits_since_s
        self.extras.compare(sums.rest, len(live), batch.step + 1)
        return _Sums(sums, len(live), self.extras.logged(sums.rest, own_logged), wait_s)

    def _run_shard(
        self,
        turn: StepTurn,
        exchange: Reducer,
        batch: Batch,
        shard: int,
        cut: range,
        must_weigh: bool,
    ) -> Counted:
        """Does forward and backward of one shard."""
        rows = self.rows.rows(batch, cut)
        cuts = self.rows.window.cut(len(cut))
        exchange.begin_shard(shard, num_micro_batches=len(cuts))

        def before(micro_batch: int) -> None:
            if micro_batch:
                self.timer.begin_forward()
                exchange.next_micro_batch()

        def before_backward(weight: float) -> None:
            self.timer.begin_backward()
            failpoint("worker.step.before_backward")
            if must_weigh:
                exchange.weigh(weight * self.setup.execution.scale.value)
            if self.compressor is not None:
                self.compressor.weigh(shard, weight)

        key = partial(self.key, turn, batch.step, shard)
        self.timer.begin_passes()
        counted = turn.passes.add_sums(rows, Window(cuts, key, before, before_backward))
        self.timer.end_passes()
        return counted

    def _apply(
        self, turn: StepTurn, batch: Batch, exchange: Reducer, sums: _Sums, *, must_divide: bool
    ) -> StepReport:
        """Turns the sums into one update, or leaves everything as it is and says so."""
        scalars = sums.scalars
        if must_divide:
            exchange.divide(scalars.weight * self.setup.execution.scale.value)
        try:
            summary = self._summary_of_sums(turn, scalars, exchange)
        except ExchangeError:
            if self.pieces is not None and self.pieces.keeps_sums():
                finish = partial(self._finish_doubtful, turn, batch, sums, self.pieces)
                self.pieces.in_doubt = StepInDoubt(batch.step + 1, finish)
            self.buffers.restore()  # the step is done again, unless its update is finished late
            raise
        share: Callable[[], bool] | None = None
        if self.pieces is not None and exchange.slices is not None:
            share = partial(self.pieces.share, exchange.slices)
            if exchange.parameters is not None:
                tell = partial(_tell_updated, exchange.parameters)
                share = partial(self.pieces.end_step, tell)
        return self._finish(turn, batch, sums, summary, share)

    def _finish_doubtful(
        self,
        turn: StepTurn,
        batch: Batch,
        sums: _Sums,
        pieces: OptimizerPieces,
        norm: float,
        is_finite: bool,
    ) -> StepReport:
        """Applies a step to the own pieces alone, once others have told the rest of its summary."""
        total = torch.scalar_tensor(norm, dtype=torch.float64)
        scalars = sums.scalars
        pieces.summary = StepSummary(scalars.loss, scalars.weight, total, is_finite)

        def leave_out() -> bool:  # not called where the step is skipped
            pieces.torn = "others have ended the exchange"
            return False

        return self._finish(turn, batch, sums, pieces.summary, leave_out)

    def _finish(
        self,
        turn: StepTurn,
        batch: Batch,
        sums: _Sums,
        summary: StepSummary,
        share: Callable[[], bool] | None,
    ) -> StepReport:
        """Makes the update with the gradients that are there; share: see `apply_step`."""
        scalars, scale = sums.scalars, self.setup.execution.scale
        scale_before = scale.value
        takes_gradients = self.setup.callbacks.takes_gradients
        hook = partial(self._call_hook, turn, batch.step) if takes_gradients else None
        summary = after_hook(summary, hook, partial(self._summary, turn, scalars))
        phase, correct = "", None
        if self.phases is not None:
            phase, correct = self.phases.phase, partial(self._take, self.phases, summary.loss)
        is_applied, learning_rates = self._update(batch.step, summary, turn.policy, correct, share)
        if is_applied:
            self.buffers.apply(scalars.rest, sums.num_live)
        if self.compressor is not None:
            if is_applied:
                self.compressor.applied()
            if scale.value != scale_before:
                self.compressor.rescale(scale.value / scale_before)
        return StepReport(
            step=batch.step + 1,
            loss=summary.loss,
            weight=summary.weight if is_applied else 0.0,
            num_rows=batch.num_rows,
            stop=scalars.stop > 0,
            grad_norm=summary.norm.item(),
            num_skipped=int(not is_applied),
            phase=phase,
            learning_rates=learning_rates,
            logged=sums.logged,
            answered=self.extras.answered(scalars.rest),
            news=() if self.phases is None else self.phases.take_news(),
            exchange_wait_s=sums.wait_s,
            is_torn=self.pieces is not None and bool(self.pieces.torn),
        )

    def _summary_of_sums(
        self, turn: StepTurn, scalars: StepScalars, exchange: Reducer
    ) -> StepSummary:
        """Summarizes the update with the sums that the exchange has made.

        A parameter that no shard reached has no gradient, as in a loop without shards: optimizers
        then leave it alone, weight decay and all.
        """
        if self.pieces is not None:
            assert exchange.slices is not None  # the one is made with the other
            return self.pieces.summarize(scalars, exchange.slices, self.setup.numerics)
        for (_, param), count in zip(self.params, scalars.reached, strict=True):
            if count == 0:
                param.grad = None
        return self._summary(turn, scalars, exchange.norms())

    def _summary(
        self, turn: StepTurn, sums: StepScalars, norms: Sequence[Tensor] | None = None
    ) -> StepSummary:
        """Summarizes the update; norms: of the gradients, where they are known."""
        grads = [param.grad for param in turn.policy.params if param.grad is not None]
        summary = summarize(sums.loss, sums.weight, grads, self.setup.numerics, norms)
        return replace(summary, is_finite=False) if sums.is_spoiled else summary

    def _call_hook(self, turn: StepTurn, step: int) -> None:
        """Has the user's code change the gradient that is about to be applied."""
        number, key, randomness = step + 1, (self.setup.job.seed, step), turn.passes.randomness
        activity = f"training step {number}"
        self.setup.callbacks.take_gradients(turn.params, number, key, randomness, activity)

    def _update(
        self,
        step: int,
        summary: StepSummary,
        policy: StepPolicy,
        correct: Callable[[Tensor], Tensor] | None = None,
        share: Callable[[], bool] | None = None,
    ) -> Applied:
        """Ends a step, which follows `step` others, with the gradients in `.grad`."""
        return apply_step(
            summary,
            policy,
            lr_factor=learning_rate_factor(policy.job.optimizer, step, self.rows.num_steps),
            activity=f"training step {step + 1}",
            number=step + 1,
            correct=correct,
            share=share,
        )

    def _take(self, phases: PhaseTraining, loss: float, norm: Tensor) -> Tensor:
        """Shows an exact gradient to the phases; returns its norm, which a correction changes."""
        is_correction = phases.phase is TrainingPhase.CORRECT
        grads = [param.grad for _, param in self.params]
        phases.take(grads, loss)
        if not is_correction:
            return norm
        numerics, corrected = self.setup.numerics, [grad for grad in grads if grad is not None]
        return total_norm(parts_of(corrected, numerics), numerics)


def _tell_updated(parameters: ParameterTransport) -> None:
    """Ends a step after which nothing is sent: others gather what they need."""
    failpoint("worker.parameters.updated")
    parameters.updated()


# ---- Check that replicas agree ----
#
# Predicted steps exchange nothing. The first exact step after them carries a checksum of each
# member's state in one extra, which is added up over shards like all extras.

ReplicaState = tuple[Mapping[str, Tensor], Mapping[str, str]]


class ReplicaCheck:
    """One member's side of the comparison; nothing at all without phases."""

    def __init__(self, phases: PhaseTraining | None) -> None:
        self._phases = phases
        self.num_extras = int(phases is not None)
        """Places at the end of the extras."""
        self._checksum = 0

    def begin_step(self, state: Callable[[], ReplicaState]) -> None:
        """Takes the checksum of the state in which an exact step begins, if a check is due."""
        is_due = self._phases is not None and self._phases.is_check_due
        self._checksum = checksum(*state()) if is_due else 0

    def with_checksum(self, extras: Tensor) -> Tensor:
        """Returns the extras of a shard with this member's checksum appended."""
        if self._phases is None:
            return extras
        return torch.cat([extras, torch.tensor([float(self._checksum)], dtype=torch.float64)])

    def compare(self, extras: Tensor, num_live: int, step: int) -> None:
        """Raises unless all members began the step with the same state: where not all are equal
        some member differs from the mean. Sums are exact: 32 bits each, as float64, last of the
        summed extras."""
        if self._phases is None or extras[-1].item() == float(self._checksum) * num_live:
            return
        message = (
            f"the replicas differ before step {step}, after predicted steps: the members' "
            "checksums of parameters, optimizer and predictor are unequal"
        )
        raise UserCodeError("ReplicasDiffer", message, activity=f"training step {step}")
