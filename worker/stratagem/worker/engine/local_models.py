"""Train the models of one member that are independent of each other, each on its shard of every
batch.

A model is a node that gossips, or a replica that takes local steps; it shares nothing but the job
with the others. This module makes one local step of each, and their trainer joins them. Used by one
thread.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.numerics.keys import Key
from stratagem.common.numerics.shards import split_rows
from stratagem.common.process.failpoints import failpoint
from stratagem.worker.data.datasets import Coming
from stratagem.worker.engine.apply_step import ReportedRates, StepPlace, StepPolicy, place_of
from stratagem.worker.engine.buffers import Buffers
from stratagem.worker.engine.forward_backward import (
    LoggedSums,
    Passes,
    Rows,
    Window,
    added,
    means,
    micro_batches,
)
from stratagem.worker.engine.reports import PartReport, StepReport
from stratagem.worker.engine.setup import Setup, TrainingRows
from stratagem.worker.engine.shadow_schedule import shadow_schedule
from stratagem.worker.engine.state import TrainerState
from stratagem.worker.engine.turns import LocalReport, LocalStep, StepTurn
from stratagem.worker.numerics.model import prepare
from stratagem.worker.numerics.randomness import KeyedRandomness

# ---- One local model ----

Value = TypeVar("Value")


@dataclass(slots=True)
class LocalSums:
    """Sums of one model's numbers over some steps."""

    weight: float = 0.0
    loss: float = 0.0
    moved: float = 0.0
    """Sum of the squared distances by which mixing with neighbours has moved the node."""
    grad_norm: float = 0.0
    """The largest finite gradient norm before clipping."""
    num_skipped: int = 0
    logged: LoggedSums = field(default_factory=dict)

    def add(self, report: LocalReport) -> None:
        """Add the numbers of a local step."""
        if report.is_skipped:
            self.num_skipped += 1
            return
        self.weight += report.counted.weight
        self.loss += report.counted.loss_sum
        self.logged = added(self.logged, report.counted.logged)
        if math.isfinite(report.grad_norm):
            self.grad_norm = max(self.grad_norm, report.grad_norm)


@dataclass(slots=True)
class LocalModel:
    """A model that trains separately, with its optimizer, buffers and sums."""

    model: nn.Module
    params: list[tuple[str, nn.Parameter]]
    saved: TrainerState
    local_step: LocalStep
    sums: LocalSums = field(default_factory=LocalSums)

    @property
    def tensors(self) -> list[Tensor]:
        """All trainable parameters, which are averaged with those of the other models."""
        return [param.detach() for _, param in self.params]


def make_local_model(setup: Setup, model: nn.Module, num_steps: int) -> LocalModel:
    """Make the local trainer of this model. num_steps: number of steps in the whole job."""
    params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = setup.optimizer_of(params)
    randomness = KeyedRandomness(model, setup.gather.device)
    execution = prepare(model, setup.job, setup.gather.device, randomness, setup.numerics)
    passes = Passes(model, setup.objective, setup.gather, randomness, execution)
    buffers = Buffers(model, setup.gather.device)
    schedule = shadow_schedule(setup.job.optimizer, num_steps, setup.entrypoints)
    policy = StepPolicy(
        *(setup.job, execution, [p for _, p in params], optimizer, buffers),
        rates=ReportedRates(setup.job.optimizer),
        numerics=setup.numerics,
        num_steps=num_steps,
        schedule=schedule,
    )
    must_divide, hooks = setup.job.window.must_divide, setup.callbacks
    local_step = LocalStep(StepTurn(params, passes, policy), must_divide, hooks)
    saved = TrainerState(model, optimizer, params, execution.scale, schedule)
    return LocalModel(model, params, saved, local_step)


def recorded_part(kind: str, number: int, report: LocalReport) -> PartReport:
    """Return the step-history entry of a model. kind: such as "node"."""
    counted = report.counted
    numbers = {"loss": counted.loss, "grad_norm": report.grad_norm, **means(counted.logged)}
    return PartReport(f"{kind}/{number}", {**in_training(numbers), **report.learning_rates})


def in_training(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers keyed by the names of training series: `train.<name>`."""
    return {f"train.{name}": value for name, value in numbers.items()}


def prefix_of(kind: str, number: int) -> str:
    """Return the prefix of a model's tensor names in the common state, such as `node3/`."""
    return f"{kind}{number}/"


def own_part(kind: str, number: int, named: Mapping[str, Value]) -> dict[str, Value]:
    """Return one model's entries of the common state, under names without the model's prefix."""
    prefix = prefix_of(kind, number)
    return {k.removeprefix(prefix): v for k, v in named.items() if k.startswith(prefix)}


# ---- All local models of a member ----


class LocalSteps(NamedTuple):
    """The results of one step of all models of a member."""

    sums: LocalSums
    num_rows: int
    """The rows of the global batch."""
    parts: list[PartReport]
    learning_rates: Mapping[str, float]
    """The learning rates of the first model's update."""

    def report(self, step: int, wait_s: float) -> StepReport:
        """Return the report of the step over this member's models; it never requests a stop, since
        the models have no common step."""
        sums = self.sums
        return StepReport(
            step=step,
            loss=sums.loss / sums.weight if sums.weight else math.nan,
            weight=sums.weight,
            num_rows=self.num_rows,
            stop=False,
            grad_norm=sums.grad_norm,
            num_skipped=sums.num_skipped,
            logged=sums.logged,
            learning_rates=self.learning_rates,
            exchange_wait_s=wait_s,
            parts=self.parts,
        )


class LocalModels:
    """The separately trained models of one member, keyed by shard. Used by one thread."""

    def __init__(self, setup: Setup, models: Mapping[int, nn.Module], kind: str) -> None:
        """Make the trainers. kind: the models' name in the step history, such as "node"."""
        self._setup, self._job, self._kind = setup, setup.job, kind
        self.rows = TrainingRows(setup)
        self.num_steps = self.rows.num_steps
        self.by_number: dict[int, LocalModel] = {
            number: make_local_model(setup, model, self.num_steps)
            for number, model in models.items()
        }
        if not all(model.params for model in self.by_number.values()):
            raise InvalidInputError.at("model", "has no trainable parameter")

    def check_form(self) -> None:
        """Raise UserCodeError if training has changed a model's tensors; called before joining."""
        for model in self.by_number.values():
            model.saved.form.check()

    def expect(self, num_shards: int, step: int, to_step: int) -> None:
        """Announce the coming steps, so that the micro-batches of the models are read ahead."""
        self._setup.gather.expect(self._coming(num_shards, step, to_step))

    def _coming(self, num_shards: int, step: int, to_step: int) -> Iterator[Coming]:
        for coming in range(step, to_step):
            batch = self.rows.batch(coming)
            shards = split_rows(batch.num_rows, num_shards)
            for number in self.by_number:
                rows = self.rows.rows(batch, shards[number])
                cuts = self.rows.window.cut(len(shards[number]))
                yield from micro_batches(rows, cuts, partial(self._key, coming, number))

    def _key(self, step: int, number: int, micro_batch: int) -> Key:
        return (self._job.seed, step, number, micro_batch)

    def lower_rates(self, num_reductions: int) -> None:
        """Set the learning rates to their values after `num_reductions` plateau reductions."""
        for model in self.by_number.values():
            model.local_step.turn.policy.lower_rates(num_reductions)

    def take_step(self, step: int, owned: range, num_shards: int) -> LocalSteps:
        """Make one step of each model, after `step` earlier ones. A model whose shard has no rows
        is unchanged. After an error the models are at different steps."""
        if [*owned] != [*self.by_number]:
            raise ValueError(f"the models here are {[*self.by_number]}, not {[*owned]}")
        batch = self.rows.batch(step)
        shards = split_rows(batch.num_rows, num_shards)
        policy = next(iter(self.by_number.values())).local_step.turn.policy
        place = place_of(policy, step)
        rates = policy.rates.of_update(place.lr_factor, policy.schedule)
        sums = LocalSums()
        parts: list[PartReport] = []
        for number, model in self.by_number.items():
            if not len(shards[number]):
                continue
            rows = self.rows.rows(batch, shards[number])
            model.local_step.turn.passes.execution.begin_batch(batch.num_rows)
            report = self._one_step(step, number, model, rows, place)
            model.sums.add(report)
            sums.add(report)
            parts.append(recorded_part(self._kind, number, report))
        return LocalSteps(sums, batch.num_rows, parts, rates)

    def _one_step(
        self, step: int, number: int, model: LocalModel, rows: Rows, place: StepPlace
    ) -> LocalReport:
        """Make one optimizer step of a model with the mean gradient over the rows."""
        model.model.train()
        window = Window(
            self.rows.window.cut(len(rows.indices)),
            key=partial(self._key, step, number),
            before_backward=lambda _: failpoint("worker.local_step.before_backward"),
        )
        try:
            return model.local_step.run(rows, window, place, step + 1)
        finally:
            model.local_step.turn.passes.randomness.end()
