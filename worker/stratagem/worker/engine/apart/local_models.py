"""The models of one member that train apart from each other, each on its shard of every batch.

Makes one local step of each; what joins them is their trainer's. Knows no gRPC, no members and no
coordinator. Used by one thread.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from torch import nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.numerics.keys import Key
from stratagem.common.numerics.shards import split_rows
from stratagem.common.process.failpoints import failpoint
from stratagem.worker.data.datasets import Coming
from stratagem.worker.engine.apart.local_model import (
    LocalModel,
    LocalSums,
    make_local_model,
    recorded_part,
)
from stratagem.worker.engine.optim.learning_rate import learning_rate_factor
from stratagem.worker.engine.step.forward_backward import Rows, Window, micro_batches
from stratagem.worker.engine.step.local_step import LocalReport
from stratagem.worker.engine.step.step_report import PartReport
from stratagem.worker.engine.trainers.trainer_setup import Setup
from stratagem.worker.engine.trainers.training_rows import TrainingRows


class LocalSteps(NamedTuple):
    """A step of all models of a member."""

    sums: LocalSums
    num_rows: int
    """Of the global batch."""
    parts: list[PartReport]
    learning_rates: Mapping[str, float]
    """Of the first one's update."""


class LocalModels:
    """Models by the number of their shard."""

    def __init__(self, setup: Setup, models: Mapping[int, nn.Module], kind: str) -> None:
        """kind: what each is called in the step history, such as "node"."""
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
        """Raises UserCodeError if training has changed which tensors a model has; before they are
        joined."""
        for model in self.by_number.values():
            model.saved.form.check()

    def expect(self, num_shards: int, step: int, to_step: int) -> None:
        """Has the micro-batches of the models' coming steps read ahead."""
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
        """Sets the rates to those after as many reductions of a plateau, from the next step on."""
        for model in self.by_number.values():
            model.local_step.turn.policy.lower_rates(num_reductions)

    def take_step(self, step: int, owned: range, num_shards: int) -> LocalSteps:
        """Makes one step of each model, which follows `step` others. One whose shard has no rows
        stays as it is. After an error the models are at different steps."""
        if [*owned] != [*self.by_number]:
            raise ValueError(f"the models here are {[*self.by_number]}, not {[*owned]}")
        batch = self.rows.batch(step)
        shards = split_rows(batch.num_rows, num_shards)
        lr_factor = learning_rate_factor(self._job.optimizer, step, self.num_steps)
        policy = next(iter(self.by_number.values())).local_step.turn.policy
        rates = policy.rates.of_update(lr_factor, policy.schedule)
        own = LocalSums()
        parts: list[PartReport] = []
        for number, model in self.by_number.items():
            if not len(shards[number]):
                continue
            rows = self.rows.rows(batch, shards[number])
            model.local_step.turn.passes.execution.begin_batch(batch.num_rows)
            report = self._one_step(step, number, model, rows, lr_factor)
            model.sums.add(report)
            own.add(report)
            parts.append(recorded_part(self._kind, number, report))
        return LocalSteps(own, batch.num_rows, parts, rates)

    def _one_step(
        self, step: int, number: int, model: LocalModel, rows: Rows, lr_factor: float
    ) -> LocalReport:
        """One optimizer step with the mean gradient of the rows."""
        model.model.train()
        window = Window(
            self.rows.window.cut(len(rows.indices)),
            key=partial(self._key, step, number),
            before_backward=lambda _: failpoint("worker.local_step.before_backward"),
        )
        try:
            return model.local_step.run(
                rows, window, lr_factor=lr_factor, step=step + 1, number=step + 1
            )
        finally:
            model.local_step.turn.passes.randomness.end()
