"""Models that train apart from each other in one process, each on its shard of every batch.

Shares model, data, loss, optimizer, keyed randomness, precision and compiled code with the engine,
but none of its stepping, transport, layout or state. What joins the models is the loops'.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from stratagem.common.job import JobSpec
from stratagem.common.numerics.shards import split_rows
from stratagem.worker.data.datasets import Gather
from stratagem.worker.data.sources import DataSources, load_data
from stratagem.worker.engine.optimizers import clip, make_optimizer
from stratagem.worker.models.build import build_model
from stratagem.worker.models.tensors import rows_dtype
from stratagem.worker.numerics.model import prepare
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.hooks import Hooks
from tests.reference.loops import SetRates, backward, cut_rows, divide, is_skipped, trained_of
from tests.reference.objective import objective_of
from tests.reference.plain_job import plainly
from tests.reference.rates import Rates
from tests.reference.reference_norm import gradient_norm
from tests.reference.row_batches import read

_CPU = torch.device("cpu")


@dataclass
class Taken:
    """A step of all models."""

    losses: dict[int, float] = field(default_factory=dict)
    """By number, of those that had rows."""
    loss_sum: float = 0.0
    """Mean loss · weight, of those that were not skipped."""
    weight: float = 0.0


class Replicas:
    """So many models, each built from the seed."""

    def __init__(
        self,
        job: JobSpec,
        entrypoints: EntryPoints,
        count: int,
        numerics: int,
        set_rates: SetRates | None = None,
    ) -> None:
        self.job, self.numerics, self.set_rates = job, numerics, set_rates
        self.data = load_data(job, entrypoints, DataSources())["train"]
        self.loss_fn = objective_of(job, entrypoints)
        self.hooks = Hooks(job, entrypoints)
        self.models = [
            self.hooks.build(build_model(job, entrypoints, device=_CPU, fresh=True))
            for _ in range(count)
        ]
        self.gather = Gather(rows_dtype(job, self.models[0]), _CPU)
        self.params = [[p for p in model.parameters() if p.requires_grad] for model in self.models]
        self.optimizers = [
            make_optimizer(
                job.optimizer,
                trained_of(model),
                fused=job.execution.fusion,
                entrypoints=entrypoints,
            )
            for model in self.models
        ]
        self.randomness = [KeyedRandomness(model, _CPU) for model in self.models]
        self.executions = [
            prepare(model, plainly(job), _CPU, keyed)
            for model, keyed in zip(self.models, self.randomness, strict=True)
        ]
        self.steps_per_epoch = -(-len(self.data) // job.batch_size)
        self.num_steps = job.steps or (job.epochs or 0) * self.steps_per_epoch
        self.rates = [
            Rates(job, optimizer, self.num_steps, entrypoints) for optimizer in self.optimizers
        ]

    def take_step(self, step: int) -> Taken:
        """One local step of each model that has rows, after `step` others."""
        epoch, position = divmod(step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(self.job.seed + epoch)
        order = torch.randperm(len(self.data), generator=generator)
        batch = torch.split(order, self.job.batch_size)[position]
        taken = Taken()
        for number, shard in enumerate(split_rows(len(batch), len(self.models))):
            if shard:
                rows = batch[shard.start : shard.stop]
                self._one(number, step, epoch, rows, len(batch), taken)
        return taken

    def _one(
        self, number: int, step: int, epoch: int, own: torch.Tensor, num_rows: int, taken: Taken
    ) -> None:
        job, model, params = self.job, self.models[number], self.params[number]
        before = [tensor.clone() for tensor in model.buffers()]
        self.optimizers[number].zero_grad()
        self.executions[number].begin_batch(num_rows)
        scale = self.executions[number].scale
        values = []
        for micro_batch, rows in enumerate(parts := cut_rows(job, own)):
            key = (job.seed, step, number, micro_batch)
            row_key = (job.seed, "row", epoch)
            x, y = read(self.gather, self.data, rows, row_key, key, self.randomness[number])
            value = self.loss_fn(model, x, y, len(rows))
            values.append(backward(job, value, len(parts), scale))
        loss, weight = divide(job, params, values, scale)
        taken.losses[number] = loss / weight if weight else loss
        if is_skipped(job, loss, params, scale):
            for tensor, old in zip(model.buffers(), before, strict=True):
                tensor.copy_(old)
            return
        self.rates[number].before(step)
        if self.set_rates is not None:
            self.set_rates(self.optimizers[number], step)
        step_key = (job.seed, step, number, 0)
        self.hooks.gradients(trained_of(model), step + 1, step_key, self.randomness[number])
        norm = gradient_norm(params, self.numerics)
        clip(params, job.optimizer.clip_norm, norm)
        self.optimizers[number].step()
        self.rates[number].after()
        taken.loss_sum += loss
        taken.weight += weight
