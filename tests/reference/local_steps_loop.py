"""What "correct" means for local steps: local SGD and DiLoCo in one process, as a loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.common.numerics.numerics_rules import CURRENT
from stratagem.common.strategy import DataParallel, Nesterov
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.loops import add_in_tree, change_of
from tests.reference.replicas import Replicas


@dataclass(frozen=True, slots=True)
class LocalStepsResult:
    """Where the loop ended."""

    state: Mapping[str, Tensor]
    """Of what the replicas have in common."""
    states: list[Mapping[str, Tensor]]
    """The same after each outer step."""
    losses: list[float]
    """After each outer step: of all rows since the one before."""
    of_replicas: list[list[float]]
    """The losses of each replica's steps."""


@torch.no_grad()
def local_steps_loop(
    job: JobSpec, entrypoints: EntryPoints, num_steps: int | None = None, numerics: int = CURRENT
) -> LocalStepsResult:
    """Local steps of all replicas, and after each `local_steps` of them an outer step of all."""
    strategy = job.strategy
    assert isinstance(strategy, DataParallel)
    options, count = strategy.options, strategy.num_replicas
    num_local = options.local_steps
    assert num_local is not None
    outer = options.outer_optimizer
    lr, momentum = (outer.lr, outer.momentum) if isinstance(outer, Nesterov) else (1.0, 0.0)
    common = Replicas(job, entrypoints, 1, numerics)
    params, buffers = common.params[0], _buffers(common, 0)
    velocity = [torch.zeros_like(param) for param in params]
    replicas = Replicas(job, entrypoints, count, numerics)
    states: list[Mapping[str, Tensor]] = []
    losses, loss, weight = [], 0.0, 0.0
    of_replicas: list[list[float]] = [[] for _ in range(count)]
    for step in range(replicas.num_steps if num_steps is None else num_steps):
        with torch.enable_grad():
            taken = replicas.take_step(step)
        loss, weight = loss + taken.loss_sum, weight + taken.weight
        for number, each in taken.losses.items():
            of_replicas[number].append(each)
        if (step + 1) % num_local and step + 1 != replicas.num_steps:
            continue
        for place, (param, kept) in enumerate(zip(params, velocity, strict=True)):
            moved = [_wide(param) - _wide(own[place]) for own in replicas.params]
            moved = [in_bits(each, options.outer_bits) for each in moved]
            gradient = (add_in_tree(moved) / count).to(param.dtype)
            kept.mul_(momentum).add_(gradient)
            param.add_(gradient.add(kept, alpha=momentum), alpha=-lr)
        for place, old in enumerate(buffers):
            owns = [_buffers(replicas, number)[place] for number in range(count)]
            change = add_in_tree([change_of(old, new, n, count) for n, new in enumerate(owns)])
            mean = change / count if old.is_floating_point() else change
            is_whole = count == 1 and old.is_floating_point()
            old.copy_(change if is_whole else old.double() + mean)
        for number in range(count):
            owns = [*replicas.params[number], *_buffers(replicas, number)]
            for own, joined in zip(owns, [*params, *buffers], strict=True):
                own.copy_(joined)
        states.append({k: v.clone() for k, v in common.models[0].state_dict().items()})
        losses.append(loss / weight if weight else math.nan)
        loss, weight = 0.0, 0.0
    return LocalStepsResult(common.models[0].state_dict(), states, losses, of_replicas)


def _buffers(replicas: Replicas, number: int) -> list[Tensor]:
    model = replicas.models[number]
    named = dict(model.named_buffers())
    return [named[name] for name in model.state_dict() if name in named]


def in_bits(values: Tensor, bits: int | None) -> Tensor:
    """What is left of the values: 2^bits - 1 levels, of one scale for each 128 of them."""
    size = math.ceil(values.numel() * (bits or 32) / 8) + 4 * math.ceil(values.numel() / 128)
    if bits is None or size >= 4 * values.numel():  # coding would save nothing
        return values
    top, flat = 2.0 ** (bits - 1) - 1, values.reshape(-1)
    blocks = []
    for block in flat.split(128):
        scale = block.abs().max() / top
        blocks.append((block / scale).round() * scale if scale > 0 else block * 0)
    return torch.cat(blocks).reshape(values.shape)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
