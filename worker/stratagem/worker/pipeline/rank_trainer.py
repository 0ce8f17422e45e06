"""Train and evaluate the stages of one rank of a pipeline, and keep its part of the state.

A rank computes its stages of every micro-batch, adds gradients up in order of micro-batch, and
steps its own optimizer after the last backward. The values that all ranks must agree on (weight,
loss, norm of all gradients, tied parameters) go round in three small messages. Nothing changes
before all ranks have said that their gradients are finite. The module knows neither gRPC nor the
coordinator.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from stratagem.common.numerics.keys import Key
from stratagem.common.numerics.shards import split_rows
from stratagem.common.pipeline.schedules import TaskKind, forward_only
from stratagem.common.process.failpoints import failpoint
from stratagem.worker.data.datasets import Coming
from stratagem.worker.data.order import BatchOrder
from stratagem.worker.data.rows import BatchKeys
from stratagem.worker.engine import state_format as state
from stratagem.worker.engine.apply_step import (
    ReportedRates,
    StepPolicy,
    StepSummary,
    apply_step,
    place_of,
)
from stratagem.worker.engine.buffers import Buffers, constant_buffers
from stratagem.worker.engine.callbacks import NO_ANSWER, StepAnswer, wish_of
from stratagem.worker.engine.forward_backward import Counted
from stratagem.worker.engine.optimizers import AVERAGE, average_of, evaluated
from stratagem.worker.engine.reports import SegmentSummary, StepReport, Tally, end_of
from stratagem.worker.engine.setup import Setup
from stratagem.worker.engine.shadow_schedule import shadow_schedule
from stratagem.worker.engine.state import State
from stratagem.worker.engine.state_format import NOTHING
from stratagem.worker.exchange.transports import END, StepScalars, num_scalars
from stratagem.worker.models.nodes import Trained
from stratagem.worker.objectives.evaluator import Begins, EvaluationPart, EvaluationShare, Evaluator
from stratagem.worker.pipeline.agreement import Agreement, StageExchange, StageGradients, only_shard
from stratagem.worker.pipeline.rank_pass import PassCallbacks, RankPass, StageChannel
from stratagem.worker.pipeline.schedule import Schedules
from stratagem.worker.pipeline.stage import StagePart
from stratagem.worker.pipeline.times import StageTimes

# ---- Rank setup ----


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The parts from which the trainer of a rank is built."""

    setup: Setup
    """The parts of any trainer. The model has this rank's nodes only, under their full names."""
    trained: list[Trained]
    """All trainable parameters of the whole model, in the model's order, with all their copies."""
    parts: Mapping[int, StagePart]
    lane: StageChannel
    micro_batch_size: int | None
    schedule: str


# ---- Rank trainer ----


class StageRunner:
    """Trainer of one rank's stages of a pipeline. Used by one thread."""

    is_sole_copy: Final = True

    def __init__(self, rank: RankSetup) -> None:
        setup, job = rank.setup, rank.setup.job
        self._rank, self.setup, self.model = rank, setup, setup.model
        self.callbacks, self._job, self._lane = setup.callbacks, job, rank.lane
        self._agreement = Agreement(rank.lane, rank.trained, setup.numerics)
        self._weights = self._agreement.own
        self.params = [(weight.name, weight.param) for weight in self._weights]
        is_trained = not job.only_evaluates
        self.optimizer = setup.optimizer_of(self.params) if self._weights and is_trained else None
        self._buffers = Buffers(self.model, setup.gather.device)
        self._average = average_of(job, self.params)
        self.num_extras = num_scalars(len(self._weights), self._buffers.num_elements)
        self._order = setup.batch_order() if is_trained else BatchOrder(1, job.batch_size, job.seed)
        self.num_steps = job.steps or (job.epochs or 0) * self._order.steps_per_epoch
        self._schedule = None
        if is_trained:
            self._schedule = shadow_schedule(job.optimizer, self.num_steps, setup.entrypoints)
        params = [param for _, param in self.params]
        self._policy = StepPolicy(
            *(job, setup.execution, params, self.optimizer, self._buffers),
            ReportedRates(job.optimizer if is_trained else None),
            *(setup.numerics, self.num_steps, self._average, self._schedule),
        )
        is_pipelined, device = rank.micro_batch_size is not None, setup.gather.device
        self.schedules = Schedules(rank.schedule, rank.lane, device, is_pipelined=is_pipelined)
        needed = rank.lane.plan.dependencies()
        own_stages = {stage: needed[stage] for stage in rank.lane.stages()}
        self._is_alone = len(own_stages) == len(needed)
        self._times = StageTimes(device, rank.lane.rank, own_stages)
        self._num_passes = 0
        self._row_key: Key = ()  # of the latest step
        self.step = 0

    @property
    def schedule_text(self) -> str:
        """The schedule's name, for display; empty if batches are not cut into micro-batches."""
        return "" if self._rank.micro_batch_size is None else str(self.schedules)

    def expect(self, owned: range, num_shards: int, to_step: int) -> None:
        """Announce the coming steps, so that stages that read micro-batches read them ahead."""
        self.setup.gather.expect(self._coming(owned, num_shards, to_step))

    def _coming(self, owned: range, num_shards: int, to_step: int) -> Iterator[Coming]:
        readers = {n for n, part in self._rank.parts.items() if part.reads_input or part.is_last}
        for step in range(self.step, to_step if readers else self.step):
            epoch, indices = self._order.batch(step)
            live = [rows for rows in split_rows(len(indices), num_shards) if rows]
            for shard in range(owned.start, min(owned.stop, len(live))):
                batches = self._micro_batches(indices[live[shard].start : live[shard].stop])
                for action in self.schedules.of(len(batches))[self._lane.rank]:
                    if action.kind is TaskKind.FORWARD and action.stage in readers:
                        key = (self._job.seed, step, shard, action.micro_batch)
                        keys = BatchKeys((self._job.seed, "row", epoch), key)
                        yield self.setup.data["train"], batches[action.micro_batch], keys

    def lower_rates(self, num_reductions: int) -> None:
        """Set the learning rates to their values after `num_reductions` plateau reductions."""
        self._policy.lower_rates(num_reductions)

    def train_step(
        self,
        exchange: StageExchange | None = None,
        owned: range = range(1),
        num_shards: int = 1,
        *,
        stop: bool = False,
        answer: StepAnswer = NO_ANSWER,
    ) -> StepReport:
        """Make one optimizer step over the next global batch, computing the `owned` shards one
        after the other.

        Without `exchange.reduce` there must be one shard, owned here. Raises UserCodeError (on all
        ranks, for a loss or gradient that is not finite) and ExchangeError; parameters, buffers and
        optimizer are then as before.
        """
        epoch, indices = self._order.batch(self.step)
        self._row_key = (self._job.seed, "row", epoch)
        live = [
            indices[rows.start : rows.stop] for rows in split_rows(len(indices), num_shards) if rows
        ]
        self.model.train()
        self._buffers.snapshot()
        self.setup.execution.begin_batch(len(indices))
        self._times.begin()
        wish = wish_of(answer, stop=stop)
        scalars, summary, wishes = self._sums(exchange, owned, live, wish)
        if wishes >= END:
            self._undo()
            return end_of(self.step)
        failpoint("worker.stages.before_apply")
        number = self.step + 1
        with self._times.updating():
            place = place_of(self._policy, self.step)
            is_applied, learning_rates, *_ = apply_step(summary, self._policy, place)
        if is_applied:
            self._buffers.apply(scalars.rest, len(live))
        self.step = number
        failpoint("worker.stages.after_apply")
        return StepReport(
            step=number,
            loss=summary.loss,
            weight=summary.weight if is_applied else 0.0,
            num_rows=len(indices),
            stop=wishes > 0,
            grad_norm=summary.norm.item(),
            num_skipped=int(not is_applied),
            learning_rates=learning_rates,
            exchange_wait_s=sum(self._times.wait_s.values()),
            parts=self._times.reports(),
            actions=self._times.actions(),
        )

    def evaluator(self) -> Evaluator:
        """The evaluator with the job's metrics and batches."""
        return self.setup.evaluator

    def end_segment(self, exchange: StageExchange, tally: Tally) -> SegmentSummary:
        """Return the summary of a segment. tally: sums over its steps."""
        if self._job.only_evaluates:
            return SegmentSummary(tally.loss, {})
        return SegmentSummary(tally.loss, tally.metrics(may_skip=self._job.window.may_skip))

    def evaluate(self, share: EvaluationShare) -> list[EvaluationPart]:
        """Evaluate all batches; return their sums on the rank of the last stage of the first
        replica, and nothing on other ranks."""
        if share.rank >= self._lane.size:
            return []
        return [part for split in share.splits for part in self.evaluate_split(split, share.begins)]

    def evaluate_split(self, split: str, begins: Begins | None = None) -> list[EvaluationPart]:
        """Evaluate a split; return the sums per batch on the last stage's rank, else nothing."""
        with evaluated(self._job, self._average), constant_buffers(self.model):
            return evaluate(self._rank, self._next_pass(), split, begins)

    def state(self) -> State:
        """Return (live tensors, metadata) of this rank's nodes; the union over all ranks is the
        whole state.

        Names are those of a single process. The optimizer state of a tied parameter comes from the
        rank with its first copy.
        """
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, str] = {}
        if self.optimizer is not None:
            firsts = [
                (weight.name, weight.param)
                for weight in self._weights
                if self._agreement.is_first(weight)
            ]
            tensors, numbers = state.optimizer_state(self.optimizer, firsts)
            if self._average is not None:
                means, counts = self._average.state(name for name, _ in firsts)
                tensors, numbers = {**tensors, **means}, {**numbers, **counts}
        numbers |= self.setup.execution.scale.metadata()
        if self._schedule is not None:
            numbers |= self._schedule.metadata()
        metadata = state.state_metadata(self.step, numbers)
        whole = {**state.model_state(self.model), **tensors}
        # Where ranks have parts, the whole is sorted by name: so that of one rank is, too.
        return dict(sorted(whole.items())) if self._is_alone else whole, metadata

    def copy_state(self, *, is_first: bool = True, into: Mapping[str, Tensor] = NOTHING) -> State:
        """Return `state` copied to the CPU; no other rank of the replica has any of it. into: see
        `state_format.copied`."""
        tensors, metadata = self.state()
        return state.copied(tensors, into), metadata

    def wants(self, name: str) -> bool:
        """Return whether `load_state` needs the tensor or number of this name from the state."""
        if name.startswith(state.OPTIMIZER):
            return name.removeprefix(state.OPTIMIZER).rpartition("/")[0] in dict(self.params)
        if name.startswith(AVERAGE):
            return self._average is not None and name.removeprefix(AVERAGE) in dict(self.params)
        return name.removeprefix(state.MODEL) in self.model.state_dict()

    def load_state(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Load a whole state, or a part with at least the names that this rank `wants`."""
        step = state.step_of(metadata)
        wanted = {name: tensor for name, tensor in tensors.items() if self.wants(name)}
        state.load_model_state(self.model, wanted)
        if self.optimizer is not None:
            numbers = {name: value for name, value in metadata.items() if self.wants(name)}
            state.load_optimizer_state(self.optimizer, self.params, wanted, numbers)
        if self._average is not None:
            self._average.load(wanted, metadata)
        if self._schedule is not None:
            self._schedule.load(metadata, step)
        self.setup.execution.scale.load(metadata)
        self.step = step

    def fingerprint(self) -> str:
        """Return the fingerprint of this rank's part of the state."""
        return state.fingerprint(*self.state())

    def _next_pass(self) -> int:
        """Return the number of the next pass, which is the same on all ranks."""
        self._num_passes += 1
        return self._num_passes - 1

    def _sums(
        self, exchange: StageExchange | None, owned: range, live: list[Tensor], wish: float
    ) -> tuple[StepScalars, StepSummary, float]:
        """Compute this replica's shards, and wait for the sums over all; return the scalars, the
        summary, and the largest request to stop."""
        try:
            if self.schedules.can_settle:
                self.schedules.settle(self._next_pass())
            computed = self._compute_all(range(owned.start, min(owned.stop, len(live))), live, wish)
            reduce = only_shard if exchange is None else exchange.reduce
            scalars = self._take(reduce(len(live), computed))
            summary, wishes = self._divide_and_agree(scalars)
            self._times.exchanged()
        except BaseException:
            self._undo()
            self._lane.transport.cut()
            raise
        return scalars, summary, wishes

    def _compute_all(
        self, shards: range, live: list[Tensor], wish: float
    ) -> Iterator[StageGradients]:
        """Yield the gradients of each live shard of this replica, each from the same buffers."""
        for shard in shards:
            if shard > shards.start:
                self._buffers.restore()
            yield self._compute(self._micro_batches(live[shard]), shard, len(live), wish)
        if not shards:  # the ranks speak to each other all the same
            self._compute((), 0, len(live), wish)

    def _micro_batches(self, rows: Tensor) -> Sequence[Tensor]:
        """Cut rows into micro-batches, of the placement's size if it has one, else of the job's."""
        if self._rank.micro_batch_size is not None:
            return torch.split(rows, self._rank.micro_batch_size)
        return [rows[cut.start : cut.stop] for cut in self._job.window.cut(len(rows))]

    def _compute(
        self, micro_batches: Sequence[Tensor], shard: int, num_live: int, wish: float
    ) -> StageGradients:
        """Run forward and backward of all micro-batches of a shard; return its gradients."""
        activity = f"training step {self.step + 1}"
        weight = loss_sum = 0.0
        for trained in self._rank.trained:
            trained.forget()

        def key(micro_batch: int) -> Key:
            return (self._job.seed, self.step, shard, micro_batch)

        def begin(micro_batch: int) -> None:
            self.setup.randomness.begin(*key(micro_batch), forget=micro_batch == 0)

        def load(micro_batch: int) -> tuple[Any, Any, int]:
            rows, gather = micro_batches[micro_batch], self.setup.gather
            keys = BatchKeys(self._row_key, key(micro_batch))
            return *gather(self.setup.data["train"], rows, activity, keys), len(rows)

        def lose(output: Any, y: Any, num_rows: int, micro_batch: int) -> Tensor:
            nonlocal weight, loss_sum
            value = self.setup.evaluator.loss(output, y, num_rows)
            mean = float(value.mean.detach())
            weight += float(value.weight)
            loss_sum += mean * value.weight
            return self.setup.execution.scale.up(value.mean * value.weight)

        lane, count, number = self._lane, len(micro_batches), self._next_pass()
        one_pass = RankPass(
            lane, self._rank.parts, number, count, self.schedules.meter, self._times
        )
        self._agreement.begin(number, count)
        lane.transport.begin(
            self._agreement.step, [*one_pass.awaited(), *self._agreement.awaited()]
        )
        if count:
            actions = self.schedules.of(count)[lane.rank]
            with self._times.working(count):
                one_pass.train(actions, PassCallbacks(activity, begin, load, lose))
        self.setup.randomness.end()
        counted = self._agreement.share_loss(Counted(loss_sum, weight))
        reached = self._agreement.sum_tied()
        changes = self._buffers.contribution(shard, num_live)
        scalars = StepScalars(counted.weight, counted.loss_sum, wish, reached, changes)
        gradients = {
            name: torch.zeros_like(param) if param.grad is None else param.grad
            for name, param in self.params
        }
        return StageGradients(gradients, scalars)

    def _take(self, total: StageGradients) -> StepScalars:
        """Set .grad of parameters that a shard reached to the sums; return the summed scalars."""
        for (name, param), count in zip(self.params, total.scalars.reached, strict=True):
            param.grad = total.gradients[name] if count else None
        return total.scalars

    def _divide_and_agree(self, scalars: StepScalars) -> tuple[StepSummary, float]:
        weight = scalars.weight
        grads = [param.grad for _, param in self.params if param.grad is not None]
        if weight and self._job.window.must_divide:
            for grad in grads:
                grad.div_(weight)
        self.setup.execution.scale.unscale(param for _, param in self.params)
        agreed = self._agreement.summarize(scalars)
        self._lane.transport.end(self._lane.timeout_s)
        return agreed

    def _undo(self) -> None:
        self.setup.randomness.end()
        self._buffers.restore()
        for weight in self._rank.trained:
            weight.forget()


# ---- Evaluation of a rank ----
#
# Evaluation runs forward only, batch behind batch.

_WINDOW_PER_STAGE: Final = 2


def evaluate(
    rank: RankSetup, number: int, split: str, begins: Begins | None
) -> list[EvaluationPart]:
    """Evaluate a split in pass `number`; return the sums per batch on the rank of the last stage,
    and nothing on other ranks."""
    evaluator, lane = rank.setup.evaluator, rank.lane
    count, num_begun = evaluator.num_batches(split), 0
    parts: list[EvaluationPart] = []

    def begin(batch: int) -> None:
        nonlocal num_begun
        if begins is not None and batch >= num_begun:  # not again for further stages here
            begins(batch, count - batch)
            num_begun = batch + 1
        evaluator.begin(split, batch)

    def measure(output: Any, y: Any, num_rows: int, batch: int) -> None:
        parts.append(evaluator.measure(split, batch, output, y, num_rows))

    reading = [part for part in rank.parts.values() if part.reads_input or part.is_last]
    evaluator.expect((split, batch) for batch in range(count) for _ in reading)
    evaluator.model.eval()
    work = PassCallbacks(
        f"evaluating {split}", begin, lambda batch: evaluator.load(split, batch), measure
    )
    one_pass = RankPass(lane, rank.parts, number, count)
    try:
        lane.transport.begin(number, one_pass.awaited())
        actions = forward_only(lane.rank_of, count)[lane.rank] if count else ()
        one_pass.forward_only(actions, work, _WINDOW_PER_STAGE * len(lane.rank_of))
        lane.transport.end(lane.timeout_s)
    except BaseException:
        lane.transport.cut()
        raise
    finally:
        evaluator.randomness.end()
    return parts
