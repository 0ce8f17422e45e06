"""A user's callbacks as the reference loops call them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from stratagem.common.job import JobSpec
from stratagem.common.numerics.keys import Key, mix
from stratagem.worker.data.rows import seed_generators
from stratagem.worker.engine.callbacks import StepView
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.user_code.entrypoints import EntryPoints


class Hooks:
    """The object that a job names; nothing where it names none."""

    def __init__(self, job: JobSpec, entrypoints: EntryPoints) -> None:
        self._seed = job.seed
        self._made: Any = entrypoints.resolve(job.callbacks)() if job.callbacks else None

    def build(self, model: nn.Module) -> nn.Module:
        if hasattr(self._made, "on_build"):
            seed_generators(mix(self._seed, "on_build"))
            self._made.on_build(model)
        return model

    def step(self, view: StepView) -> bool:
        """Whether the training ends with this step."""
        if hasattr(self._made, "on_step"):
            self._made.on_step(view)
        return view.wants_end

    def gradients(
        self,
        named: list[tuple[str, nn.Parameter]],
        step: int,
        key: Key,
        randomness: KeyedRandomness,
    ) -> None:
        """step: from 1. key: of the step's random numbers."""
        if hasattr(self._made, "on_gradients"):
            randomness.begin("on_gradients", *key)
            found: dict[str, Tensor] = {n: p.grad for n, p in named if p.grad is not None}
            self._made.on_gradients(found, step)
