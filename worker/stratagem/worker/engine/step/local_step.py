"""One optimizer step of a model that is not shared: a gossip node's, or a federated client's.

Its window of micro-batches is one transaction: what raises, or is not finite, leaves parameters,
optimizer and buffers as they were. Must not know nodes, clients and rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from stratagem.common.job import JobSpec
from stratagem.worker.engine.optim.finite_gradients import inspect, not_finite
from stratagem.worker.engine.optim.optimizers import clip, update
from stratagem.worker.engine.step.forward_backward import Counted, Passes, Rows, Window
from stratagem.worker.engine.step.model_buffers import Buffers
from stratagem.worker.user_code.entrypoints import user_code


@dataclass(frozen=True, slots=True)
class LocalReport:
    """The outcome of a local step. grad_norm: 2-norm of the whole gradient before clipping."""

    counted: Counted
    grad_norm: float
    is_skipped: bool


@dataclass(frozen=True, slots=True)
class LocalStep:
    """Does the steps of one model. Used by one thread."""

    job: JobSpec
    params: Sequence[nn.Parameter]
    passes: Passes
    buffers: Buffers
    numerics: int
    """Version of the rules that decide the bits; see stratagem.common.numerics.numerics_rules."""

    def run(
        self,
        optimizer: torch.optim.Optimizer,
        rows: Rows,
        window: Window,
        *,
        step: int | None = None,
        pull: Callable[[], None] = lambda: None,
    ) -> LocalReport:
        """Makes one step over these rows.

        step: its number from 1, for error messages. pull: may add to the mean gradient.
        """
        accumulation, max_norm = self.job.window, self.job.optimizer.clip_norm
        scale = self.passes.execution.scale
        self.buffers.snapshot()
        self._forget()
        try:
            counted = self.passes.add_mean(rows, window, must_divide=accumulation.must_divide)
            pull()
            grads = [param.grad for param in self.params if param.grad is not None]
            found = inspect(
                counted.loss,
                counted.weight,
                grads,
                is_clipped=max_norm is not None,
                numerics=self.numerics,
            )
            if found.what and not (scale.absorbs(found.what) or accumulation.may_skip):
                raise not_finite(found.what, rows.activity, step)
        except BaseException:
            self._drop()
            raise
        if found.what:
            self._drop()
        else:
            scale.keep()
            clip(self.params, max_norm, found.norm)
            with user_code(rows.activity):
                update(optimizer)
            if self.passes.execution.frees_gradients:
                self._forget()
        return LocalReport(counted, found.norm.item(), bool(found.what))

    def _drop(self) -> None:
        self.buffers.restore()
        self._forget()

    def _forget(self) -> None:
        for param in self.params:
            param.grad = None
