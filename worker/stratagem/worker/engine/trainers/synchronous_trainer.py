"""The synchronous training step of one member.

Computes the shards that this member owns, passes their gradients to an exchange, and applies the
sum; parameters change only after the exchange is complete, so a step that failed leaves no trace.
Knows no gRPC, no members and no coordinator.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.numerics.batch_shards import split_rows
from stratagem.common.numerics.mixed_keys import Key
from stratagem.common.process.failpoints import failpoint
from stratagem.common.strategy import Federated
from stratagem.worker.data.datasets import Coming
from stratagem.worker.data.stream_dataset import StreamDataset
from stratagem.worker.engine.numerics.mixed_precision import LossScale
from stratagem.worker.engine.objectives.evaluator import EvaluationPart, EvaluationShare, Evaluator
from stratagem.worker.engine.optim.finite_gradients import StepSummary, after_hook, summarize
from stratagem.worker.engine.optim.learning_rate import learning_rate_factor
from stratagem.worker.engine.optim.reported_rates import ReportedRates
from stratagem.worker.engine.optim.shadow_schedule import shadow_schedule
from stratagem.worker.engine.optim.weight_average import average_of, evaluated
from stratagem.worker.engine.step import state_format as state
from stratagem.worker.engine.step.apply_step import StepPolicy, apply_step
from stratagem.worker.engine.step.callbacks import Callbacks
from stratagem.worker.engine.step.forward_backward import (
    Counted,
    Passes,
    Rows,
    Window,
    micro_batches,
    part,
)
from stratagem.worker.engine.step.logged_sums import NUM_EXTRAS, LoggedSums, packed, unpacked
from stratagem.worker.engine.step.model_buffers import Buffers
from stratagem.worker.engine.step.step_answer import NO_ANSWER, AnswerExtras, StepAnswer, wish_of
from stratagem.worker.engine.step.step_report import SegmentSummary, StepReport, Tally, end_of
from stratagem.worker.engine.trainers.replica_check import ReplicaCheck
from stratagem.worker.engine.trainers.trainer_setup import Setup
from stratagem.worker.engine.trainers.trainer_state import State, TrainerState
from stratagem.worker.exchange.buckets.bucket_layout import BUCKET_BYTES, CODED_BUCKET_BYTES
from stratagem.worker.exchange.buckets.gradient_buckets import GradientBuckets
from stratagem.worker.exchange.buckets.gradient_norm import parts_of, total_norm
from stratagem.worker.exchange.buckets.step_scalars import END, StepScalars, num_scalars
from stratagem.worker.exchange.coded.gradient_compressor import compressor_of
from stratagem.worker.exchange.reducer import Reducer
from stratagem.worker.phases import PassTimer, PhaseTraining, TrainingPhase


class Trainer:
    """Model, optimizer and data position of one session. Used by one thread."""

    def __init__(self, setup: Setup) -> None:
        self.setup, job, self.model = setup, setup.job, setup.model
        self.job, self._data = job, setup.data
        self._execution = execution = setup.execution
        self._passes = Passes(
            setup.model, setup.objective, setup.gather, setup.randomness, execution
        )
        if "train" not in setup.data:
            known = ", ".join(setup.data) or "none"
            raise InvalidInputError.at("data", f'has no split "train"; it has: {known}')
        self.params = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        if not self.params:
            raise InvalidInputError.at("model", "has no trainable parameter")
        self.optimizer = setup.optimizer_of(self.params)
        self._buffers = Buffers(self.model, setup.gather.device)
        self._order = setup.batch_order()
        self.num_steps = job.steps or (job.epochs or 0) * self._order.steps_per_epoch
        self.phases: PhaseTraining | None = None
        if job.phases is not None:
            self.phases = PhaseTraining(job.phases, self.params, setup.numerics)
        self._timer = PassTimer(setup.gather.device, is_idle=job.phases is None)
        self._replicas = ReplicaCheck(self.phases)
        self._may_log = setup.objective.may_log
        num_rest = self._buffers.num_elements + self._replicas.num_extras
        num_rest += NUM_EXTRAS if self._may_log else 0
        num_before = self._buffers.num_elements + (NUM_EXTRAS if self._may_log else 0)
        self._answers = AnswerExtras(setup.callbacks, num_before)
        num_rest += self._answers.num_extras
        self.num_extras = num_scalars(len(self.params), num_rest)
        self.compressor = compressor_of(
            job,
            self.params,
            self.num_extras,
            absorbs=self._execution.scale.is_dynamic,
            numerics=setup.numerics,
        )
        self._average = average_of(job, self.params)
        schedule = None
        # Clients have schedules of their own, and turns have none by entry point.
        if job.optimizer is not None and not isinstance(job.strategy, Federated):
            schedule = shadow_schedule(job.optimizer, self.num_steps, setup.entrypoints)
        self._saved = TrainerState(
            self.model,
            self.optimizer,
            self.params,
            self._execution.scale,
            self.phases,
            self.compressor,
            self._average,
            schedule,
        )
        params = [param for _, param in self.params]
        self._policy = StepPolicy(
            *(job, execution, params, self.optimizer, self._buffers),
            ReportedRates(job.optimizer),
            self._average,
            schedule,
        )
        self.step = 0
        self._window, self._counts_rows = job.window, setup.objective.counts_rows
        self._is_training = False
        self._wait_s = 0.0  # of the latest step, for the sums
        self._losses: list[float] = []  # of its own micro-batches
        self._logged: LoggedSums = {}  # of the latest step
        self._rates: Mapping[str, float] = {}  # of the latest step

    def expect(self, owned: range, num_shards: int, to_step: int) -> None:
        """Has the micro-batches of the coming steps read ahead. Phases say in each step only
        whether its batch is read."""
        if self.phases is None:
            self.setup.gather.expect(self._coming(owned, num_shards, to_step))

    def _coming(self, owned: range, num_shards: int, to_step: int) -> Iterator[Coming]:
        for step in range(self.step, to_step):
            epoch, indices = self._order.batch(step)
            live = split_rows(indices.shape[0], min(num_shards, indices.shape[0]))
            for shard in range(owned.start, min(owned.stop, len(live))):
                rows = self._rows(step, epoch, part(indices, live[shard]))
                cuts = self._window.cut(rows.indices.shape[0])
                yield from micro_batches(rows, cuts, partial(self._key, step, shard))

    def _rows(self, step: int, epoch: int, indices: Tensor) -> Rows:
        """Returns the rows of a shard of a step."""
        key = (self.job.seed, "row", epoch)
        return Rows(self._data["train"], indices, f"training step {step + 1}", key)

    def _key(self, step: int, shard: int, micro_batch: int) -> Key:
        return (self.job.seed, step, shard, micro_batch)

    @property
    def callbacks(self) -> Callbacks:
        """The hooks of the user's."""
        return self.setup.callbacks

    @property
    def _exchange_number(self) -> int:
        """The number of the next exchange of gradients, from 1."""
        return self.step + 1

    def lower_rates(self, num_reductions: int) -> None:
        """Sets the rates to those after as many reductions of a plateau, from the next step on."""
        self._policy.lower_rates(num_reductions)

    def train_step(
        self,
        exchange: Reducer,
        owned: range,
        num_shards: int,
        *,
        stop: bool = False,
        answer: StepAnswer = NO_ANSWER,
    ) -> StepReport:
        """Makes one optimizer step over the next global batch, cut into `num_shards` shards.

        In a Predict phase the batch is passed over: nothing is computed on it, nothing exchanged.
        """
        self._timer.begin_step()
        if self.phases is not None and not self.phases.phase.is_exact:
            return self._predicted_step(self.phases)
        self._replicas.begin_step(self.state)
        epoch, indices = self._order.batch(self.step)
        num_rows = indices.shape[0]
        live = split_rows(num_rows, min(num_shards, num_rows))
        if not self._is_training:  # walks all modules
            self.model.train()
            self._is_training = True
        self._buffers.snapshot()
        self._execution.begin_batch(num_rows)
        own = range(owned.start, min(owned.stop, len(live)))
        self._losses, logged = [], None
        divisor, wish = self._divisor(num_rows), wish_of(answer, stop=stop)
        must_weigh = divisor is None and self._window.must_divide
        try:
            exchange.begin_step(self._exchange_number, owned, len(live), divisor=divisor)
            for shard in own:
                if shard > owned.start:
                    self._buffers.restore()
                rows = self._rows(self.step, epoch, part(indices, live[shard]))
                counted = self._run_shard(exchange, shard, rows, must_weigh=must_weigh)
                self._losses += counted.losses
                rest = self._buffers.contribution(shard, len(live))
                if self._may_log:
                    logged = tuple(counted.logged)
                    rest = torch.cat([rest, packed(counted.logged)])
                rest = self._answers.appended(rest, shard, answer)
                rest = self._replicas.with_checksum(rest)
                scalars = StepScalars(
                    counted.weight, counted.loss_sum, wish, exchange.reached(), rest
                )
                exchange.end_shard(shard, scalars)
            waits_since_s = time.perf_counter()
            sums = exchange.finish()
            self._wait_s = time.perf_counter() - waits_since_s
            self._replicas.compare(sums.rest, len(live), self.step + 1)
            start = self._buffers.num_elements
            self._logged = (
                unpacked(sums.rest[start : start + NUM_EXTRAS], logged) if self._may_log else {}
            )
        except BaseException:
            # The step will be done again, perhaps with other members: forget all of it.
            exchange.discard()
            self._buffers.restore()
            raise
        finally:
            self._passes.randomness.end()
        if sums.stop >= END:
            exchange.discard()
            self._buffers.restore()
            return end_of(self.step)
        failpoint("worker.step.before_apply")
        report = self._apply(exchange, sums, len(live), num_rows, must_divide=must_weigh)
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

    def evaluate(self, share: EvaluationShare) -> list[EvaluationPart]:
        """Returns the sums of the share's batches."""
        with evaluated(self.job, self._average):
            return self.evaluator().parts_of(share)

    def state(self) -> State:
        """(live tensors by name, metadata). Valid until the next step."""
        return self._saved.live(self.step)

    def copy_state(self, *, is_first: bool = True) -> State:
        """Returns `state`, copied to the CPU: it does not change while training continues.

        Also what this member alone holds; and of a party of which each member holds something
        alone, only the first gives what all of them have.
        """
        return self._saved.copied(self.step, with_shared=is_first or not self.is_sole_copy)

    @cached_property
    def buckets(self) -> GradientBuckets:
        """The storage of gradients that go over an exchange; it outlives memberships."""
        bucket_bytes = BUCKET_BYTES if self.compressor is None else CODED_BUCKET_BYTES
        return GradientBuckets(self.params, num_extras=self.num_extras, bucket_bytes=bucket_bytes)

    @property
    def is_sole_copy(self) -> bool:
        """True if this member holds state that no other has: residuals of its shards."""
        return self.compressor is not None and self.compressor.keeps_state

    def end_segment(self, exchange: Reducer, tally: Tally) -> SegmentSummary:
        """Returns the summary of a segment with these sums over its steps."""
        loss, metrics = tally.loss, tally.metrics(may_skip=self._window.may_skip)
        if self.phases is not None:
            metrics |= self.phases.metrics
            if not tally.weight:  # a segment of predicted steps only
                loss = self.phases.last_loss
        coder = self.compressor
        return SegmentSummary(loss, metrics, {} if coder is None else asdict(coder.take_traffic()))

    def stream_marks(self) -> dict[int, str]:
        """Returns a mark of each stream of rows that is read here, as JSON; none for other rows."""
        train = self._data["train"]
        return train.marks() if isinstance(train, StreamDataset) else {}

    def add_stream_marks(self, marks: Mapping[int, str]) -> None:
        """Takes over marks of any streams, to read on from. No bit depends on them."""
        train = self._data["train"]
        if isinstance(train, StreamDataset):
            train.add_marks(marks)

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

    def _run_shard(self, exchange: Reducer, shard: int, rows: Rows, *, must_weigh: bool) -> Counted:
        """Forward and backward of one shard. must_weigh: the divisor is not known before."""
        cuts = self._window.cut(rows.indices.shape[0])
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
            key=partial(self._key, self.step, shard),
            before=lambda micro_batch: self._next_micro_batch(exchange) if micro_batch else None,
            before_backward=before_backward,
        )
        self._timer.begin_passes()
        counted = self._passes.add_sums(rows, window)
        self._timer.end_passes()
        return counted

    def _next_micro_batch(self, exchange: Reducer) -> None:
        self._timer.begin_forward()
        exchange.next_micro_batch()

    def _apply(
        self,
        exchange: Reducer,
        sums: StepScalars,
        num_live: int,
        num_rows: int,
        *,
        must_divide: bool,
    ) -> StepReport:
        """Turns the sums into one update, or leaves everything as it is and says so."""
        scale_before = self._execution.scale.value
        if must_divide:
            exchange.divide(sums.weight * scale_before)
        # A parameter that no shard reached has no gradient, as in a loop without shards:
        # optimizers then leave it alone, weight decay and all.
        for (_, param), count in zip(self.params, sums.reached, strict=True):
            if count == 0:
                param.grad = None
        summary = self._summary(sums, exchange.norms())
        hook = self._call_hook if self.callbacks.takes_gradients else None
        summary = after_hook(summary, hook, partial(self._summary, sums))
        phase, correct = "", None
        if self.phases is not None:
            phase, correct = self.phases.phase, partial(self._take, self.phases, summary.loss)
        is_applied = self._update(summary, self._policy, correct)
        if is_applied:
            self._buffers.apply(sums.rest, num_live)
        if self.compressor is not None:
            if is_applied:
                self.compressor.applied()
            if self._execution.scale.value != scale_before:
                self.compressor.rescale(self._execution.scale.value / scale_before)
        return StepReport(
            step=self.step,
            loss=summary.loss,
            weight=summary.weight if is_applied else 0.0,
            num_rows=num_rows,
            stop=sums.stop > 0,
            grad_norm=summary.norm.item(),
            num_skipped=int(not is_applied),
            phase=phase,
            learning_rates=self._rates,
            logged=self._logged,
            answered=self._answers.taken(sums.rest),
            micro_batch_losses=tuple(self._losses),
            news=() if self.phases is None else self.phases.take_news(),
            exchange_wait_s=self._wait_s,
        )

    def _summary(self, sums: StepScalars, norms: Sequence[Tensor] | None = None) -> StepSummary:
        """Summarizes the step; norms: of the gradients, where they are known."""
        grads = [param.grad for param in self._policy.params if param.grad is not None]
        summary = summarize(sums.loss, sums.weight, grads, self.setup.numerics, norms)
        return replace(summary, is_finite=False) if sums.is_spoiled else summary

    def _call_hook(self) -> None:
        """Has the user's code change the gradient that is about to be applied."""
        number, randomness = self.step + 1, self._passes.randomness
        self.callbacks.take_gradients(
            self.params, number, (self.job.seed, self.step), randomness, f"training step {number}"
        )

    def _update(
        self,
        summary: StepSummary,
        policy: StepPolicy,
        correct: Callable[[Tensor], Tensor] | None = None,
    ) -> bool:
        """Ends the step with the gradients in `.grad`; returns whether it was applied."""
        number = self.step + 1
        lr_factor = learning_rate_factor(policy.job.optimizer, self.step, self.num_steps)
        self._rates = policy.rates_of(lr_factor)
        is_applied = apply_step(
            summary,
            policy,
            lr_factor=lr_factor,
            activity=f"training step {number}",
            number=number,
            correct=correct,
        )
        self.step = number
        return is_applied

    # ---- phase training ----

    def _take(self, phases: PhaseTraining, loss: float, norm: Tensor) -> Tensor:
        """Shows an exact gradient to the phases; returns its norm, which a correction changes."""
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
        phase, predicted = phases.phase, phases.predict()
        for (_, param), gradient in zip(self.params, predicted, strict=True):
            param.grad = gradient
        grads = [gradient for gradient in predicted if gradient is not None]
        summary = summarize(phases.last_loss, 1.0, grads, self.setup.numerics)
        # There was no forward pass, and no loss that was scaled.
        execution = replace(self._execution, scale=LossScale(is_dynamic=False))
        is_applied = self._update(summary, replace(self._policy, execution=execution, buffers=None))
        phases.end_predicted()
        self._timer.end_predicted_step(phases)
        failpoint("worker.phases.predicted")
        return StepReport(
            step=self.step,
            loss=summary.loss,
            weight=0.0,
            num_rows=0,
            stop=False,
            grad_norm=summary.norm.item(),
            num_skipped=int(not is_applied),
            phase=phase,
            learning_rates=self._rates,
            news=phases.take_news(),
        )
