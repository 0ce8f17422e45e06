"""DiLoCo as torchft has it, in one process: pytorch/torchft, torchft/local_sgd.py (classes `DiLoCo`
and `_StreamingDiLoCoFragment`) at commit 73dafea422116b2a713542719c8454efe5444c6c of 2025-10-21.

Every replica has a global copy and an outer optimizer of its own, which stay equal; per fragment
pseudo-gradients (global - local) are averaged one parameter after the other, and not in buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class Fragment:
    """`_StreamingDiLoCoFragment` of one replica."""

    params: Sequence[nn.Parameter]
    outer: torch.optim.Optimizer
    original: list[Tensor]
    grads: list[Tensor]

    def prepare_sync(self) -> None:
        self.grads = [old - p.detach() for old, p in zip(self.original, self.params, strict=True)]

    def perform_sync(self, averaged: Sequence[Tensor], alpha: float) -> None:
        local = [param.detach().clone() for param in self.params]
        for place, param in enumerate(self.params):
            param.data.copy_(self.original[place])
            param.grad = averaged[place].clone()
        self.outer.step()
        self.original = [param.detach().clone() for param in self.params]
        for param, own in zip(self.params, local, strict=True):
            param.data.lerp_(own, alpha)
        self.outer.zero_grad()


class TorchftDiLoCo:
    """`DiLoCo`, for all replicas at once: call `after_step` after each step of their optimizers."""

    def __init__(
        self,
        replicas: Sequence[Sequence[Sequence[nn.Parameter]]],
        sync_every: int,
        *,
        lr: float,
        momentum: float,
        delay: int = 0,
        alpha: float = 0.0,
    ) -> None:
        """replicas: of each the parameters of each fragment. delay: `fragment_sync_delay`. alpha:
        `fragment_update_alpha`, the share of its own parameters that a replica keeps."""
        self._period, self._delay, self._alpha = sync_every // len(replicas[0]), delay, alpha
        self._local_step = self._current_step = 0

        def of(params: Sequence[nn.Parameter]) -> Fragment:
            outer = torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=momentum > 0)
            return Fragment(params, outer, [param.detach().clone() for param in params], [])

        self._fragments = [[of(params) for params in replica] for replica in replicas]

    def after_step(self) -> None:
        self._local_step += 1
        current = self._current_step % len(self._fragments[0])
        of_all = [replica[current] for replica in self._fragments]
        if self._local_step == self._period - self._delay:
            for fragment in of_all:
                fragment.prepare_sync()
        if self._local_step < self._period:
            return
        each = zip(*(fragment.grads for fragment in of_all), strict=True)
        averaged = [sum(grads[1:], grads[0]) / len(grads) for grads in each]  # allreduce, AVG
        for fragment in of_all:
            fragment.perform_sync(averaged, self._alpha)
        self._local_step, self._current_step = 0, self._current_step + 1
