"""The synchronous training step of one member.

Computes the shards that this member owns, passes their gradients to an exchange, and applies the
sum; parameters change only after the exchange is complete, so a step that failed leaves no trace.
Knows no gRPC, no members and no coordinator.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from torch import Tensor

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.numerics.batch_shards import split_rows
from stratagem.common.process.failpoints import failpoint
from stratagem.worker.data.sampler import BatchOrder
from stratagem.worker.engine.objectives.evaluator import Evaluator
from stratagem.worker.engine.objectives.losses import counts_rows
from stratagem.worker.engine.optim.finite_gradients import GradientCheck, inspect, not_finite
from stratagem.worker.engine.optim.learning_rate import learning_rate, set_learning_rate
from stratagem.worker.engine.optim.optimizers import clip, make_optimizer, update
from stratagem.worker.engine.step import state_format as state
from stratagem.worker.engine.step.forward_backward import Counted, Passes, Rows, Window, part
from stratagem.worker.engine.step.model_buffers import Buffers
from stratagem.worker.engine.step.step_report import StepReport
from stratagem.worker.engine.trainers.replica_check import ReplicaCheck
from stratagem.worker.engine.trainers.trainer_setup import Setup
from stratagem.worker.engine.trainers.trainer_state import State, TrainerState
from stratagem.worker.exchange.buckets.gradient_norm import parts_of, total_norm
from stratagem.worker.exchange.buckets.step_scalars import StepScalars
from stratagem.worker.exchange.coded.gradient_compressor import compressor_of
from stratagem.worker.exchange.reducer import GradientReducer
from stratagem.worker.exchange.single_member import SingleMemberReducer
from stratagem.worker.phases import PassTimer, PhaseTraining, TrainingPhase
from stratagem.worker.user_code.entrypoints import user_code

_FIXED: Final = 3
"""How many extras come before those of the parameters: [weight, sum of the loss, wish to stop, one
per parameter that says whether it was reached; buffers, and with phases the state's checksum]."""


class Trainer:
    """Model, optimizer and data position of one session. Used by one thread."""

    def __init__(self, setup: Setup) -> None:
        self.setup, job, self.model = setup, setup.job, setup.model
        self.job, self._data = job, setup.data
        self._execution = execution = setup.execution
        self._passes = Passes(setup.model, setup.loss, setup.gather, setup.randomness, execution)
        if "train" not in setup.data:
            known = ", ".join(setup.data) or "none"
            raise InvalidInputError.at("data", f'has no split "train"; it has: {known}')
        self.params = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        if not self.params:
            raise InvalidInputError.at("model", "has no trainable parameter")
        self.optimizer = make_optimizer(
            job.optimizer, [param for _, param in self.params], fused=job.execution.fusion
        )
        self._buffers = Buffers(self.model, setup.gather.device)
        self._order = BatchOrder(len(setup.data["train"]), job.batch_size, job.seed)
        self.num_steps = job.steps or (job.epochs or 0) * self._order.steps_per_epoch
        self.phases: PhaseTraining | None = None
        if job.phases is not None:
            self.phases = PhaseTraining(job.phases, self.params, setup.numerics)
        self._timer = PassTimer(setup.gather.device, is_idle=job.phases is None)
        self._replicas = ReplicaCheck(self.phases)
        num_extras = _FIXED + len(self.params) + self._buffers.num_elements
        self.num_extras = num_extras + self._replicas.num_extras
        self.compressor = compressor_of(
            job,
            self.params,
            self.num_extras,
            mark=_FIXED,
            absorbs=self._execution.scale.is_dynamic,
            numerics=setup.numerics,
        )
        self._saved = TrainerState(
            self.model,
            self.optimizer,
            self.params,
            self._execution.scale,
            self.phases,
            self.compressor,
        )
        self.step = 0
        self._window, self._counts_rows = job.window, counts_rows(job.loss)
        self._is_training = False
        self._wait_s = 0.0  # of the latest step, for the sums
        self._losses: list[float] = []  # of its own micro-batches

    def train_step(
        self,
        exchange: GradientReducer | SingleMemberReducer,
        owned: range,
        num_shards: int,
        *,
        stop: bool = False,
    ) -> StepReport:
        """Makes one optimizer step over the next global batch, cut into `num_shards` shards.

        In a Predict phase the batch is passed over: nothing is computed on it, nothing exchanged.
        """
        self._timer.begin_step()
        if self.phases is not None and not self.phases.phase.is_exact:
            return self._predicted_step(self.phases)
        self._replicas.begin_step(self.state)
        _, indices = self._order.batch(self.step)
        num_rows = indices.shape[0]
        live = split_rows(num_rows, min(num_shards, num_rows))
        if not self._is_training:  # walks all modules
            self.model.train()
            self._is_training = True
        self._buffers.snapshot()
        self._execution.begin_batch(num_rows)
        own = range(owned.start, min(owned.stop, len(live)))
        self._losses = []
        divisor = self._divisor(num_rows)
        must_weigh = divisor is None and self._window.must_divide
        try:
            exchange.begin_step(self.step + 1, owned, len(live), divisor=divisor)
            for shard in own:
                if shard > owned.start:
                    self._buffers.restore()
                rows = part(indices, live[shard])
                counted = self._run_shard(exchange, shard, rows, must_weigh=must_weigh)
                self._losses += counted.losses
                changes = self._buffers.contribution(shard, len(live))
                changes = self._replicas.with_checksum(changes)
                head = [counted.weight, counted.loss_sum, float(stop), *exchange.reached()]
                exchange.end_shard(shard, StepScalars(head, changes))
            waits_since_s = time.perf_counter()
            totals = exchange.finish(_FIXED + len(self.params))
            self._wait_s = time.perf_counter() - waits_since_s
        except BaseException:
            # The step will be done again, perhaps with other members: forget all of it.
            exchange.discard()
            self._buffers.restore()
            raise
        finally:
            self._passes.randomness.end()
        failpoint("worker.step.before_apply")
        report = self._apply(exchange, totals, len(live), num_rows, must_divide=must_weigh)
        if self._execution.frees_gradients:
            exchange.free_gradients()
        failpoint("worker.step.after_apply")
        self._timer.end_exact_step(self.phases, report.phase)
        return report

    def evaluator(self) -> Evaluator:
        """Returns the evaluator of the present state, to be used before the next step."""
        self._is_training = False
        self.model.eval()
        return self.setup.evaluator

    def state(self) -> State:
        """(live tensors by name, metadata). Valid until the next step."""
        return self._saved.live(self.step)

    def copy_state(self, *, is_first: bool = True) -> State:
        """Returns `state`, copied to the CPU: it does not change while training continues.

        Also what this member alone holds; and of a party of which each member holds something
        alone, only the first gives what all of them have.
        """
        return self._saved.copied(self.step, with_shared=is_first or not self.is_sole_copy)

    @property
    def is_sole_copy(self) -> bool:
        """True if this member holds state that no other has: residuals of its shards."""
        return self.compressor is not None and self.compressor.keeps_state

    def load_state(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Continues from a state that `state` gave, of this or another process."""
        self.step = self._saved.load(tensors, metadata)

    def fingerprint(self) -> str:
        """Returns a fingerprint, which is equal on all members that hold the same state."""
        return state.fingerprint(*self.state())

    def _divisor(self, num_rows: int) -> float | None:
        """Returns the divisor of the sums if known before the step; gradients then come divided.

        None where it depends on the weights, or where nothing is divided.
        """
        scale = self._execution.scale
        if not self._window.must_divide:
            return scale.value if scale.is_dynamic else None
        return num_rows * scale.value if self._counts_rows else None

    def _run_shard(
        self,
        exchange: GradientReducer | SingleMemberReducer,
        shard: int,
        rows: Tensor,
        *,
        must_weigh: bool,
    ) -> Counted:
        """Forward and backward of one shard. must_weigh: the divisor is not known before."""
        cuts = self._window.cut(rows.shape[0])
        exchange.begin_shard(shard, num_micro_batches=len(cuts))

        def before_backward(weight: float) -> None:
            self._timer.begin_backward()
            failpoint("worker.step.before_backward")
            if must_weigh:
                exchange.weigh(weight * self._execution.scale.value)
            if self.compressor is not None:
                self.compressor.weigh(shard, weight)

        window = Window(
            cuts,
            key=lambda micro_batch: (self.job.seed, self.step, shard, micro_batch),
            before=lambda micro_batch: self._next_micro_batch(exchange) if micro_batch else None,
            before_backward=before_backward,
        )
        what = Rows(self._data["train"], rows, f"training step {self.step + 1}")
        self._timer.begin_passes()
        counted = self._passes.add_sums(what, window)
        self._timer.end_passes()
        return counted

    def _next_micro_batch(self, exchange: GradientReducer | SingleMemberReducer) -> None:
        self._timer.begin_forward()
        exchange.next_micro_batch()

    def _apply(
        self,
        exchange: GradientReducer | SingleMemberReducer,
        totals: StepScalars,
        num_live: int,
        num_rows: int,
        *,
        must_divide: bool,
    ) -> StepReport:
        """Turns the sums into one update, or leaves everything as it is and says so."""
        weight, loss_sum, wishes, *reached = totals.head
        loss = loss_sum / weight if weight else math.nan
        try:
            self._replicas.compare(totals.rest, num_live, self.step + 1)
        except UserCodeError:
            exchange.discard()
            self._buffers.restore()
            raise
        if must_divide:
            exchange.divide(weight * self._execution.scale.value)
        # A parameter that no shard reached has no gradient, as in a loop without shards:
        # optimizers then leave it alone, weight decay and all.
        for (_, param), count in zip(self.params, reached, strict=True):
            if count == 0:
                param.grad = None
        grads = [param.grad for _, param in self.params if param.grad is not None]
        found = self._inspect(loss, weight, grads, exchange.norms())
        if math.isnan(reached[0]) and not found.what:  # the compressor's mark
            found = replace(found, what="gradient")
        scale_before = self._execution.scale.value
        phase = "" if self.phases is None else self.phases.phase
        if found.what:
            exchange.discard()
            self._buffers.restore()
            if not (self._execution.scale.absorbs(found.what) or self._window.may_skip):
                raise self._not_finite(found)
        else:
            self._execution.scale.keep()
            self._buffers.apply(totals.rest, num_live)
            norm = found.norm if self.phases is None else self._take(self.phases, loss, found.norm)
            self._update(norm)
            if self.compressor is not None:
                self.compressor.applied()
        if self.compressor is not None and self._execution.scale.value != scale_before:
            self.compressor.rescale(self._execution.scale.value / scale_before)
        self.step += 1
        return StepReport(
            step=self.step,
            loss=loss,
            weight=0.0 if found.what else weight,
            num_rows=num_rows,
            stop=wishes > 0,
            grad_norm=found.norm.item(),
            num_skipped=int(bool(found.what)),
            phase=phase,
            micro_batch_losses=tuple(self._losses),
            exchange_wait_s=self._wait_s,
        )

    def _inspect(
        self,
        loss: float,
        weight: float,
        grads: Sequence[Tensor],
        norms: Sequence[Tensor] | None = None,
    ) -> GradientCheck:
        return inspect(
            loss,
            weight,
            grads,
            is_clipped=self.job.optimizer.clip_norm is not None,
            numerics=self.setup.numerics,
            norms=norms,
        )

    def _update(self, norm: Tensor) -> None:
        """Clips the gradients in `.grad`, whose norm is given, and makes one optimizer step."""
        spec = self.job.optimizer
        set_learning_rate(self.optimizer, learning_rate(spec, self.step, self.num_steps))
        clip([param for _, param in self.params], spec.clip_norm, norm)
        with user_code(f"training step {self.step + 1}"):
            update(self.optimizer)

    def _not_finite(self, found: GradientCheck) -> UserCodeError:
        return not_finite(found.what, f"training step {self.step + 1}", self.step + 1)

    # ---- phase training ----

    def _take(self, phases: PhaseTraining, loss: float, norm: Tensor) -> Tensor:
        """Shows an exact gradient to the phases; its norm, which a correction changes."""
        is_correction = phases.phase is TrainingPhase.CORRECT
        grads = [param.grad for _, param in self.params]
        phases.take(grads, loss)
        if not is_correction:
            return norm
        numerics = self.setup.numerics
        return total_norm(
            parts_of([grad for grad in grads if grad is not None], numerics), numerics
        )

    def _predicted_step(self, phases: PhaseTraining) -> StepReport:
        """An update with a gradient that every member predicts for itself, from the same history to
        the same bits."""
        phase, gradients = phases.phase, phases.predict()
        for (_, param), gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient
        grads = [gradient for gradient in gradients if gradient is not None]
        found = self._inspect(phases.last_loss, 1.0, grads)
        if not found.what:
            self._update(found.norm)
        elif not self._window.may_skip:
            raise self._not_finite(found)
        self.step += 1
        phases.end_predicted()
        self._timer.end_predicted_step(phases)
        failpoint("worker.phases.predicted")
        return StepReport(
            step=self.step,
            loss=phases.last_loss,
            weight=0.0,
            num_rows=0,
            stop=False,
            grad_norm=found.norm.item(),
            num_skipped=int(bool(found.what)),
            phase=phase,
        )
