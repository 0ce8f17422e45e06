"""Train one member whose model is the same on all members of its party (synchronous training).

A trainer keeps model, optimizer and position in the data over the steps, evaluations and segments
of a session. The module knows neither gRPC nor members nor the coordinator.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property, partial

from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.numerics.shards import split_rows
from stratagem.common.process.failpoints import failpoint
from stratagem.common.strategy import Federated
from stratagem.worker.data.datasets import Coming
from stratagem.worker.engine import state_format
from stratagem.worker.engine.apply_step import ReportedRates, StepPolicy
from stratagem.worker.engine.buffers import Buffers, constant_buffers
from stratagem.worker.engine.callbacks import NO_ANSWER, StepAnswer
from stratagem.worker.engine.forward_backward import Passes, micro_batches
from stratagem.worker.engine.optimizers import AVERAGE, average_of, evaluated
from stratagem.worker.engine.reports import SegmentSummary, StepReport, Tally
from stratagem.worker.engine.setup import Batch, Setup, TrainingRows
from stratagem.worker.engine.shadow_schedule import ShadowSchedule, shadow_schedule
from stratagem.worker.engine.shared_step import (
    PhasedUpdate,
    Share,
    SharedStep,
    StepExtras,
    Update,
    WholeUpdate,
)
from stratagem.worker.engine.slices import StateShare, make_pieces
from stratagem.worker.engine.state import State, TrainerState
from stratagem.worker.engine.state_format import NOTHING
from stratagem.worker.engine.turns import StepTurn, make_turns, unfreeze, whole_step
from stratagem.worker.exchange.buckets import GradientBuckets
from stratagem.worker.exchange.compressor import compressor_of
from stratagem.worker.exchange.layout import BUCKET_BYTES, CODED_BUCKET_BYTES, LENT_BUCKET_BYTES
from stratagem.worker.exchange.reducer import Reducer
from stratagem.worker.exchange.transports import num_scalars
from stratagem.worker.objectives.evaluator import EvaluationPart, EvaluationShare, Evaluator

# ---- Synchronous trainer ----


class Trainer:
    """Trainer of a model that all members hold alike. Used by one thread."""

    def __init__(self, setup: Setup, share: StateShare | None = None) -> None:
        """Make the trainer. share: this member's slice of the optimizer's state, or None for
        all."""
        self.setup, self.job, self.model = setup, setup.job, setup.model
        self.callbacks, self.share = setup.callbacks, share
        job, execution = setup.job, setup.execution
        self._rows = TrainingRows(setup)
        self.num_steps = self._rows.num_steps
        self.params = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        if not self.params:
            raise InvalidInputError.at("model", "has no trainable parameter")
        self.optimizer = setup.optimizer_of(self.params)
        buffers = Buffers(self.model, setup.gather.device)
        self.phased = None if job.phases is None else PhasedUpdate(job.phases, self.params, setup)
        may_log = setup.objective.may_log
        extras = StepExtras(buffers, setup.callbacks, self.phased, may_log=may_log)
        self.num_extras = num_scalars(len(self.params), extras.num_elements)
        self.compressor = compressor_of(
            job,
            self.params,
            self.num_extras,
            absorbs=execution.scale.is_dynamic,
            numerics=setup.numerics,
        )
        self.pieces = None
        if share is not None:
            layout = self.buckets.layout
            self.pieces = make_pieces(self.optimizer, self.params, layout, share, self.model)
        update: Update = self.pieces or self.phased or WholeUpdate(self.params)
        self._passing = nullcontext if self.pieces is None else self.pieces.passing
        self._average = average_of(job, self.params)
        schedule = self._make_schedule()
        phases = None if self.phased is None else self.phased.phases
        self._saved = TrainerState(
            *(self.model, self.optimizer, self.params, execution.scale, schedule),
            further=[part for part in (phases, self._average) if part is not None],
            compressor=self.compressor,
            pieces=self.pieces,
        )
        self.turns = self._make_turns(buffers, schedule)
        add_sums = Passes.add_sums if self.phased is None else self.phased.add_sums
        self._shared_step = SharedStep(
            *(setup, self._rows, buffers, extras, self.compressor, add_sums, update)
        )
        self.step = 0
        self._is_training = False

    def connect(self, exchange: Reducer) -> None:
        """Prepare for steps and evaluations over this exchange; a collective call. Raises
        ExchangeError."""
        if self.pieces is not None:
            self.pieces.connect(exchange)

    def _make_schedule(self) -> ShadowSchedule | None:
        """Make the user's schedule of all steps; None if the job has none."""
        job = self.job
        # Clients have schedules of their own, and turns have none by entry point.
        if job.turns is not None or isinstance(job.strategy, Federated):
            return None
        return shadow_schedule(job.optimizer, self.num_steps, self.setup.entrypoints)

    def _make_turns(self, buffers: Buffers, schedule: ShadowSchedule | None) -> list[StepTurn]:
        setup, job, execution = self.setup, self.job, self.setup.execution
        passes = Passes(
            *(self.model, setup.objective, setup.gather, setup.randomness, execution),
            around=self._passing,
        )
        params: list[Tensor] = [param for _, param in self.params]
        if self.pieces is not None:
            params = self.pieces.tensors  # they alone have gradients when a step is applied
        policy = StepPolicy(
            *(job, execution, params, self.optimizer, buffers),
            *(ReportedRates(job.optimizer), setup.numerics, self.num_steps),
            *(self._average, schedule),
        )
        return make_turns(job, setup.entrypoints, passes, policy, self.params)

    def expect(self, owned: range, num_shards: int, to_step: int) -> None:
        """Announce the coming steps, so that their micro-batches are read ahead; not under phase
        training, in which each step decides whether its batch is read."""
        if self.phased is None:
            self.setup.gather.expect(self._coming(owned, num_shards, to_step))

    def _coming(self, owned: range, num_shards: int, to_step: int) -> Iterator[Coming]:
        for step in range(self.step, to_step):
            batch = self._rows.batch(step)
            live = split_rows(batch.num_rows, min(num_shards, batch.num_rows))
            for turn in self.turns:
                for shard in range(owned.start, min(owned.stop, len(live))):
                    rows = self._rows.rows(batch, live[shard])
                    cuts = self._rows.window.cut(len(live[shard]))
                    key = partial(self._shared_step.key, turn, step, shard)
                    yield from micro_batches(rows, cuts, key)

    def lower_rates(self, num_reductions: int) -> None:
        """Set the learning rates to their values after `num_reductions` plateau reductions."""
        for turn in self.turns:
            turn.policy.lower_rates(num_reductions)

    def train_step(
        self,
        exchange: Reducer,
        owned: range,
        num_shards: int,
        *,
        stop: bool = False,
        answer: StepAnswer = NO_ANSWER,
    ) -> StepReport:
        """Make one optimizer step over the next global batch, cut into `num_shards` shards; with
        turns, one step of each turn, all or none.

        In a Predict phase the batch is skipped: nothing is computed on it, nothing exchanged.
        """
        if self.phased is not None and not self.phased.begins_exact(self.state):
            return self._predicted_step(self.phased)
        batch = self._rows.batch(self.step)
        if not self._is_training:  # walks all modules
            self.model.train()
            self._is_training = True
        report = self._take_turns(batch, Share(exchange, owned, num_shards, stop, answer))
        if report.is_end:
            return report
        self.step = report.step
        if self.setup.execution.frees_gradients:
            exchange.free_gradients()
        failpoint("worker.step.after_apply")
        if self.phased is not None:
            self.phased.end(report)
        return report

    def finish_step_in_doubt(self, norm: float, *, is_finite: bool) -> StepReport:
        """Apply the step whose norm did not arrive, since other members have applied it; their
        updates come later, with the slices of all."""
        assert self.pieces is not None
        assert self.pieces.in_doubt is not None
        report = self.pieces.in_doubt.finish(norm, is_finite)
        self.pieces.in_doubt = None
        self.step = report.step
        return report

    def take_average(self) -> None:
        """Add the parameters to their average, if the latest step has not done so."""
        if self._average is not None:
            self._average.update(self.step)

    def _take_turns(self, batch: Batch, share: Share) -> StepReport:
        """Make the updates of a step: one, or one per turn."""
        turns = self.turns
        if len(turns) == 1:
            return self._shared_step.run(turns[0], 1, batch, share)
        reports = []
        with all_or_none(turns, self._saved, batch.step):
            for turn in turns:
                turn.begin(self.params)
                reports.append(self._shared_step.run(turn, len(turns), batch, share))
        return whole_step(turns, reports)

    def _predicted_step(self, phased: PhasedUpdate) -> StepReport:
        """Make an update with a predicted gradient; no batch is read."""
        (turn,) = self.turns
        report = phased.predict(turn.policy, self.step)
        self.step = report.step
        failpoint("worker.phases.predicted")
        return report

    def evaluator(self) -> Evaluator:
        """Return the evaluator of the present state, to be used before the next step."""
        self._is_training = False
        self.model.eval()
        return self.setup.evaluator

    def evaluate(self, share: EvaluationShare) -> list[EvaluationPart]:
        """Evaluate this member's share of the batches; return the sums."""
        with evaluated(self.job, self._average), constant_buffers(self.model), self._passing():
            parts = self.evaluator().parts_of(share)
        if self.pieces is not None:
            self.pieces.end_passes()
        return parts

    def state(self) -> State:
        """Return (live tensors by name, metadata), valid until the next step."""
        return self._saved.live(self.step)

    def copy_state(self, *, is_first: bool = True, into: Mapping[str, Tensor] = NOTHING) -> State:
        """Return `state` copied to the CPU, with the parts that only this member holds.

        If members hold separate residuals, only the first one includes the common state; if each
        holds a slice, each copies a part of the whole. into: tensors that may be overwritten.
        """
        with_shared = is_first or not self.is_sole_copy
        return self._saved.copied(self.step, with_shared=with_shared, into=into)

    def copy_mirror(self, into: Mapping[str, Tensor] = NOTHING) -> State | None:
        """Return the `copy_state` of the member before this one, from the mirror of its slice; None
        without a mirror. into: tensors that may be overwritten."""
        return self._saved.copied_mirror(self.step, into)

    @cached_property
    def buckets(self) -> GradientBuckets:
        """The buckets through which gradients are exchanged; they outlive memberships."""
        bucket_bytes = BUCKET_BYTES if self.compressor is None else CODED_BUCKET_BYTES
        is_full = self.share is not None and self.share.is_full and self.share.size > 1
        return GradientBuckets(
            self.params,
            num_extras=self.num_extras,
            bucket_bytes=LENT_BUCKET_BYTES if is_full else bucket_bytes,
            gives_back=is_full and self.setup.gather.device.type == "cpu",
        )

    @property
    def is_sole_copy(self) -> bool:
        """True if only this member holds some state: residuals of its shards, or an unmirrored
        slice of the optimizer's state."""
        has_residuals = self.compressor is not None and self.compressor.keeps_state
        return has_residuals or (self.pieces is not None and not self.pieces.is_mirrored)

    def end_segment(self, exchange: Reducer, tally: Tally) -> SegmentSummary:
        """Return the summary of a segment. tally: sums over its steps."""
        loss, metrics = tally.loss, tally.metrics(may_skip=self._rows.window.may_skip)
        if self.phased is not None:
            metrics |= self.phased.phases.metrics
            if not tally.weight:  # a segment of predicted steps only
                loss = self.phased.phases.last_loss
        coder = self.compressor
        return SegmentSummary(loss, metrics, {} if coder is None else asdict(coder.take_traffic()))

    def stream_marks(self) -> dict[int, str]:
        """Return the read position (mark) of each stream read here, as JSON; maybe none."""
        return self._rows.stream_marks()

    def add_stream_marks(self, marks: Mapping[int, str]) -> None:
        """Add read positions of any streams, to continue from. They do not change any rows."""
        self._rows.add_stream_marks(marks)

    def load_state(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Load a result of `state`, of this or another process."""
        self.step = self._saved.load(tensors, metadata)

    def fingerprint(self) -> str:
        """Return a fingerprint, equal on all members with the same state."""
        return state_format.fingerprint(*self.state())


# ---- Transaction over several turns ----
#
# Where one turn of a step fails, the turns before it are undone, so that the whole step is done
# again, perhaps with other members.


@contextmanager
def all_or_none(turns: Sequence[StepTurn], saved: TrainerState, step: int) -> Iterator[None]:
    """Context manager around the turns of a step: if one fails, the earlier ones are undone.

    Only state that turns before the last one change is copied; the last one changes nothing before
    all its sums have arrived.
    """
    of_last = {name for name, _ in turns[-1].params}
    tensors, metadata = saved.live(step)
    tensors_before = {name: t.clone() for name, t in tensors.items() if not _belongs(name, of_last)}
    try:
        yield
    except BaseException:
        live = saved.live(step)[0].items()
        tensors_of_last = {name: tensor for name, tensor in live if _belongs(name, of_last)}
        saved.load({**tensors_of_last, **tensors_before}, metadata)
        raise
    finally:
        unfreeze(saved.params)


def _belongs(name: str, of_last: Set[str]) -> bool:
    """Return whether, of all turns of a step, only the last changes this tensor of a state."""
    if name.startswith(AVERAGE):
        return True
    if name.startswith(state_format.OPTIMIZER):
        name = name.removeprefix(state_format.OPTIMIZER).rpartition("/")[0]
    return name.removeprefix(state_format.MODEL) in of_last
