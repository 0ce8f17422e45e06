"""One model that trains apart from the others: its optimizer, its sums, and its names.

It is a node that gossips, or a replica that takes local steps. It has nothing in common with the
others of its member but the job; what joins it with those is its trainer's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor, nn

from stratagem.worker.engine.numerics.keyed_randomness import KeyedRandomness
from stratagem.worker.engine.numerics.prepare_model import prepare
from stratagem.worker.engine.optim.reported_rates import ReportedRates
from stratagem.worker.engine.optim.shadow_schedule import shadow_schedule
from stratagem.worker.engine.step.apply_step import StepPolicy
from stratagem.worker.engine.step.forward_backward import Passes
from stratagem.worker.engine.step.local_step import LocalReport, LocalStep
from stratagem.worker.engine.step.logged_sums import (
    LoggedSums,
    added,
    means,
)
from stratagem.worker.engine.step.model_buffers import Buffers
from stratagem.worker.engine.step.step_report import (
    PartReport,
)
from stratagem.worker.engine.step.turns import StepTurn
from stratagem.worker.engine.trainers.trainer_setup import Setup
from stratagem.worker.engine.trainers.trainer_state import TrainerState

Value = TypeVar("Value")


@dataclass(slots=True)
class LocalSums:
    """Sums of one model over steps."""

    weight: float = 0.0
    loss: float = 0.0
    moved: float = 0.0
    """Squared distance that mixing moved a node, added up."""
    grad_norm: float = 0.0
    """The largest before clipping, of those that are finite."""
    num_skipped: int = 0
    logged: LoggedSums = field(default_factory=dict)

    def add(self, report: LocalReport) -> None:
        """Account for a local step."""
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
    """One model, with nothing in common with the others but the job."""

    model: nn.Module
    params: list[tuple[str, nn.Parameter]]
    saved: TrainerState
    local_step: LocalStep
    sums: LocalSums = field(default_factory=LocalSums)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are joined with those of others: all trainable parameters."""
        return [param.detach() for _, param in self.params]


def make_local_model(setup: Setup, model: nn.Module, num_steps: int) -> LocalModel:
    """Return what trains this model, for so many steps of the whole job."""
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
        schedule=schedule,
    )
    must_divide, hooks = setup.job.window.must_divide, setup.callbacks
    local_step = LocalStep(StepTurn(params, passes, policy), must_divide, setup.numerics, hooks)
    saved = TrainerState(model, optimizer, params, execution.scale, None, None, None, schedule)
    return LocalModel(model, params, saved, local_step)


def recorded_part(kind: str, number: int, report: LocalReport) -> PartReport:
    """What is recorded of the step of a model of this kind, such as "node"."""
    counted = report.counted
    numbers = {"loss": counted.loss, "grad_norm": report.grad_norm, **means(counted.logged)}
    return PartReport(f"{kind}/{number}", {**in_training(numbers), **report.learning_rates})


def in_training(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return numbers under the names of series of the training."""
    return {f"train.{name}": value for name, value in numbers.items()}


def prefix_of(kind: str, number: int) -> str:
    """Return what the names of a model begin with in the state of all of them."""
    return f"{kind}{number}/"


def own_part(kind: str, number: int, named: Mapping[str, Value]) -> dict[str, Value]:
    """Return what is one model's in the state of all of them, under its own names."""
    prefix = prefix_of(kind, number)
    return {k.removeprefix(prefix): v for k, v in named.items() if k.startswith(prefix)}
