"""Update a model that all members of a party share: one synchronous step, or one turn of it.

A member computes the gradients of its own shards, passes them to an exchange, and applies the sum.
Parameters change only after the exchange is complete, so an update that fails leaves no trace. The
module knows neither gRPC nor members nor the coordinator.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from stratagem.common.base.errors import UserCodeError
from stratagem.common.job.schedules import PhasesSpec
from stratagem.common.numerics.keys import Key
from stratagem.common.numerics.shards import split_rows
from stratagem.common.process.failpoints import failpoint
from stratagem.worker.engine.apply_step import (
    Applied,
    StepPolicy,
    StepSummary,
    after_hook,
    apply_step,
    place_of,
)
from stratagem.worker.engine.buffers import Buffers
from stratagem.worker.engine.callbacks import AnswerExtras, Callbacks, StepAnswer, wish_of
from stratagem.worker.engine.forward_backward import (
    NUM_EXTRAS,
    Counted,
    LoggedSums,
    Passes,
    Rows,
    Window,
    packed,
    unpacked,
)
from stratagem.worker.engine.reports import StepReport, end_of
from stratagem.worker.engine.setup import Batch, Setup, TrainingRows
from stratagem.worker.engine.slices import OptimizerPieces
from stratagem.worker.engine.state import State
from stratagem.worker.engine.state_format import checksum
from stratagem.worker.engine.turns import NamedParams, StepTurn
from stratagem.worker.exchange.compressor import Compressor
from stratagem.worker.exchange.layout import parts_of, total_norm
from stratagem.worker.exchange.reducer import Reducer
from stratagem.worker.exchange.transports import END, StepScalars
from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.numerics.precision import LossScale
from stratagem.worker.phases import PassTimer, PhaseTraining, TrainingPhase

# ---- Updates ----
#
# An update turns the sums of a step into new parameters: `WholeUpdate` of all that are trained,
# `PhasedUpdate` likewise under phase training, and `OptimizerPieces` of this member's slices where
# the state is divided.


class WholeUpdate:
    """The plain update of all parameters: every member makes the same one from the same sums."""

    def __init__(self, params: NamedParams) -> None:
        self.params = params

    def summarize(self, policy: StepPolicy, scalars: StepScalars, exchange: Reducer) -> StepSummary:
        """Summarize the gradient of the whole model, which every member holds.

        A parameter that no shard reached has no gradient, as in a loop without shards: optimizers
        then leave it alone, weight decay and all.
        """
        for (_, param), count in zip(self.params, scalars.reached, strict=True):
            if count == 0:
                param.grad = None
        loss, is_spoiled = scalars.loss, scalars.is_spoiled
        return policy.summarize(loss, scalars.weight, exchange.norms(), is_spoiled=is_spoiled)

    def apply(
        self, summary: StepSummary, policy: StepPolicy, step: int, exchange: Reducer | None
    ) -> Applied:
        """Update all parameters."""
        return apply_step(summary, policy, place_of(policy, step))


class PhasedUpdate:
    """The update of all parameters under phase training, in which some steps predict their
    gradient.

    Exact gradients are shown to the phases. Predicted steps exchange nothing. The first exact step
    after them carries a checksum of each member's state in one of the extras.
    """

    def __init__(self, spec: PhasesSpec, params: NamedParams, setup: Setup) -> None:
        self.phases = PhaseTraining(spec, params, setup.numerics)
        self.timer = PassTimer(setup.gather.device)
        self.checksum = 0.0
        """Checksum of the state at the beginning of an exact step, if a check is due; else 0."""
        self._setup, self._params = setup, params
        self.summarize = WholeUpdate(params).summarize

    def begins_exact(self, state: Callable[[], State]) -> bool:
        """Begin a step; return whether it computes its gradient, so that it needs its batch."""
        self.timer.begin_step()
        self.checksum = float(checksum(*state())) if self.phases.is_check_due else 0.0
        return self.phases.phase.is_exact

    def add_sums(self, passes: Passes, rows: Rows, window: Window) -> Counted:
        """Run forward and backward of a shard and time them; see `Passes.add_sums`."""
        timer = self.timer

        def before(micro_batch: int) -> None:
            if micro_batch:
                timer.turn(to_backward=False)
            window.before(micro_batch)

        def before_backward(weight: float) -> None:
            timer.turn(to_backward=True)
            window.before_backward(weight)

        timer.begin_passes()
        timed = replace(window, before=before, before_backward=before_backward)
        counted = passes.add_sums(rows, timed)
        timer.turn(to_backward=False)
        return counted

    def apply(
        self, summary: StepSummary, policy: StepPolicy, step: int, exchange: Reducer | None
    ) -> Applied:
        """Update all parameters with the exact gradient, after the phases may have corrected it."""
        phase, correct = self.phases.phase, partial(self._take, summary.loss)
        applied = apply_step(summary, policy, place_of(policy, step), correct=correct)
        return applied._replace(phase=phase, news=self.phases.take_news())

    def _take(self, loss: float, norm: Tensor) -> Tensor:
        """Let the phase training see and perhaps correct an exact gradient; return its norm."""
        is_correction = self.phases.phase is TrainingPhase.CORRECT
        grads = [param.grad for _, param in self._params]
        self.phases.take(grads, loss)
        if not is_correction:
            return norm
        numerics, corrected = self._setup.numerics, [grad for grad in grads if grad is not None]
        return total_norm(parts_of(corrected, numerics), numerics)

    def predict(self, policy: StepPolicy, step: int) -> StepReport:
        """Make an update after `step` earlier ones with a gradient that every member predicts to
        the same bits."""
        phase, loss = self.phases.phase, self.phases.last_loss
        for (_, param), gradient in zip(self._params, self.phases.predict(), strict=True):
            param.grad = gradient
        # There was no forward pass, and no loss that was scaled.
        execution = replace(self._setup.execution, scale=LossScale(is_dynamic=False))
        policy = replace(policy, execution=execution, buffers=None)
        summary = policy.summarize(loss, 1.0)
        applied = apply_step(summary, policy, place_of(policy, step))
        self.phases.end_predicted()
        self.timer.end_predicted_step(self.phases)
        return StepReport(
            step=step + 1,
            loss=loss,
            weight=0.0,
            num_rows=0,
            stop=False,
            grad_norm=summary.norm.item(),
            num_skipped=int(not applied.is_applied),
            phase=phase,
            learning_rates=applied.learning_rates,
            news=self.phases.take_news(),
        )

    def end(self, report: StepReport) -> None:
        """Finish an exact step, and record its duration."""
        self.timer.end_exact_step(self.phases, report.phase)


Update = WholeUpdate | PhasedUpdate | OptimizerPieces


# ---- Extras of a step ----
#
# The extras travel beside the gradients and are added up with them, shard by shard: changes of the
# buffers, the values that the step logs, the answer of `on_step`, and a checksum. Only `StepExtras`
# knows their order.


class StepExtras:
    """Packs and unpacks the scalars that travel with a step. Used by one thread."""

    def __init__(
        self, buffers: Buffers, callbacks: Callbacks, phased: PhasedUpdate | None, *, may_log: bool
    ) -> None:
        self._buffers, self._phased, self._may_log = buffers, phased, may_log
        self._first_logged = buffers.num_elements
        self._end_logged = self._first_logged + (NUM_EXTRAS if may_log else 0)
        self._answers = AnswerExtras(callbacks, self._end_logged)
        num_checksums = int(phased is not None)  # the last of all
        self.num_elements = self._end_logged + self._answers.num_extras + num_checksums

    def of_shard(self, shard: int, num_live: int, logged: LoggedSums, answer: StepAnswer) -> Tensor:
        """Return the extras of a shard after its passes: 1-d float64."""
        extras = self._buffers.contribution(shard, num_live)
        if self._may_log:
            extras = torch.cat([extras, packed(logged)])
        if self._answers.num_extras:
            extras = self._answers.appended(extras, shard, answer)
        if self._phased is None:
            return extras
        return torch.cat([extras, torch.tensor([self._phased.checksum], dtype=torch.float64)])

    def compare(self, total: Tensor, num_live: int, step: int) -> None:
        """Raise UserCodeError unless all members began the step with the same state; checked after
        predicted steps only. The sum of 32-bit checksums is exact in float64."""
        if self._phased is None or total[-1].item() == self._phased.checksum * num_live:
            return
        message = (
            f"the replicas differ before step {step}, after predicted steps: the members' "
            "checksums of parameters, optimizer and predictor are unequal"
        )
        raise UserCodeError("ReplicasDiffer", message, activity=f"training step {step}")

    def logged(self, total: Tensor, own: LoggedSums | None) -> LoggedSums:
        """Return the values logged by all shards. own: the values of one of this member's shards,
        if it has any. Raises UserCodeError unless all shards have logged the same names."""
        if not self._may_log:
            return {}
        names = None if own is None else tuple(own)
        return unpacked(total[self._first_logged : self._end_logged], names)

    def answered(self, total: Tensor) -> dict[str, float]:
        """Return the values that on_step has logged for the previous step."""
        return self._answers.taken(total) if self._answers.num_extras else {}


# ---- Shared step ----


class Share(NamedTuple):
    """This member's part in a step: its exchange, its shards, and whether it wishes to stop."""

    exchange: Reducer
    owned: range
    num_shards: int
    stop: bool
    answer: StepAnswer


class _Sums(NamedTuple):
    """The scalars summed over all live shards (those with rows); the gradients are in `.grad`."""

    scalars: StepScalars
    num_live: int
    logged: LoggedSums
    wait_s: float


@dataclass(frozen=True, slots=True)
class SharedStep:
    """Makes the synchronous updates of one model. Used by one thread."""

    setup: Setup
    rows: TrainingRows
    buffers: Buffers
    extras: StepExtras
    compressor: Compressor | None
    add_sums: Callable[[Passes, Rows, Window], Counted]
    """Runs forward and backward of a shard; see `Passes.add_sums`."""
    update: Update

    def run(self, turn: StepTurn, num_turns: int, batch: Batch, share: Share) -> StepReport:
        """Make one turn (one of a step's updates) over the batch. num_turns: turns per step."""
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

    def key(self, turn: StepTurn, step: int, shard: int, micro_batch: int) -> Key:
        """Return the key of a micro-batch's random numbers."""
        return (self.setup.job.seed, step, *turn.key, shard, micro_batch)

    def _divisor(self, turn: StepTurn, num_rows: int) -> float | None:
        """Return the divisor of the gradient sums if it is known before the step; gradients then
        arrive divided.

        None if it depends on the weights, or if nothing is divided.
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
        """Compute this member's shards, and wait for the sums over all. number: the exchange's,
        from 1. must_weigh: the divisor is not known in advance."""
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
        """Run forward and backward over one shard's rows."""
        rows = self.rows.rows(batch, cut)
        cuts = self.rows.window.cut(len(cut))
        exchange.begin_shard(shard, num_micro_batches=len(cuts))

        def before(micro_batch: int) -> None:
            if micro_batch:
                exchange.next_micro_batch()

        def before_backward(weight: float) -> None:
            failpoint("worker.step.before_backward")
            if must_weigh:
                exchange.weigh(weight * self.setup.execution.scale.value)
            if self.compressor is not None:
                self.compressor.weigh(shard, weight)

        key = partial(self.key, turn, batch.step, shard)
        return self.add_sums(turn.passes, rows, Window(cuts, key, before, before_backward))

    def _apply(
        self, turn: StepTurn, batch: Batch, exchange: Reducer, sums: _Sums, *, must_divide: bool
    ) -> StepReport:
        """Apply the sums as one update. After an ExchangeError the step can be done again."""
        scalars = sums.scalars
        if must_divide:
            exchange.divide(scalars.weight * self.setup.execution.scale.value)
        try:
            summary = self.update.summarize(turn.policy, scalars, exchange)
        except ExchangeError:
            if isinstance(self.update, OptimizerPieces):
                self.update.doubt(batch.step + 1, partial(self._finish_late, turn, batch, sums))
            self.buffers.restore()  # the step is done again, unless its update is finished late
            raise
        return self._finish(turn, batch, sums, summary, exchange)

    def _finish_late(
        self, turn: StepTurn, batch: Batch, sums: _Sums, norm: float, is_finite: bool
    ) -> StepReport:
        """Apply a step on this member alone, once others have sent the missing gradient norm."""
        total = torch.scalar_tensor(norm, dtype=torch.float64)
        summary = StepSummary(sums.scalars.loss, sums.scalars.weight, total, is_finite)
        return self._finish(turn, batch, sums, summary, None)

    def _finish(
        self,
        turn: StepTurn,
        batch: Batch,
        sums: _Sums,
        summary: StepSummary,
        exchange: Reducer | None,
    ) -> StepReport:
        """Make the update with the gradients in `.grad`. exchange: None if others have left."""
        scalars, scale, policy = sums.scalars, self.setup.execution.scale, turn.policy
        scale_before = scale.value
        if self.setup.callbacks.takes_gradients:
            hook = partial(self._call_hook, turn, batch.step)
            summarize = partial(policy.summarize, scalars.loss, scalars.weight)
            summary = after_hook(summary, hook, summarize)
        applied = self.update.apply(summary, policy, batch.step, exchange)
        if applied.is_applied:
            self.buffers.apply(scalars.rest, sums.num_live)
        if self.compressor is not None:
            if applied.is_applied:
                self.compressor.applied()
            if scale.value != scale_before:
                self.compressor.rescale(scale.value / scale_before)
        return StepReport(
            step=batch.step + 1,
            loss=summary.loss,
            weight=summary.weight if applied.is_applied else 0.0,
            num_rows=batch.num_rows,
            stop=scalars.stop > 0,
            grad_norm=summary.norm.item(),
            num_skipped=int(not applied.is_applied),
            phase=applied.phase,
            learning_rates=applied.learning_rates,
            logged=sums.logged,
            answered=self.extras.answered(scalars.rest),
            news=applied.news,
            exchange_wait_s=sums.wait_s,
            is_torn=applied.is_torn,
        )

    def _call_hook(self, turn: StepTurn, step: int) -> None:
        """Call the user's gradient hook before the gradients are applied."""
        number, key, randomness = step + 1, (self.setup.job.seed, step), turn.passes.randomness
        activity = f"training step {number}"
        self.setup.callbacks.take_gradients(turn.params, number, key, randomness, activity)
