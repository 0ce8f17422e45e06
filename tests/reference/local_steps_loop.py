"""What "correct" means for local steps: local SGD, DiLoCo and Streaming DiLoCo in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.strategy import DataParallel, Nesterov
from stratagem.common.strategy.local_steps import fragments_of
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.loops import add_in_tree, change_of
from tests.reference.replicas import Replicas, Taken


@dataclass(frozen=True, slots=True)
class LocalStepsResult:
    """Where the loop ended."""

    state: Mapping[str, Tensor]
    """Of what the replicas have in common."""
    states: list[Mapping[str, Tensor]]
    """The same after each outer step."""
    losses: list[float]
    """After each outer step: of all rows since the one before."""
    joined_at: list[int]
    """The steps of those outer steps; the last one may have two."""
    of_replicas: list[list[float]]
    """The losses of each replica's steps."""
    drifts: dict[int, list[float]]
    """By step after which a part was cut: how far each replica was from what all have in common."""


@torch.no_grad()
def local_steps_loop(
    job: JobSpec, entrypoints: EntryPoints, num_steps: int | None = None, numerics: int = CURRENT
) -> LocalStepsResult:
    """Local steps of all replicas, and after each `local_steps` of them an outer step of all."""
    strategy = job.strategy
    assert isinstance(strategy, DataParallel)
    options, count = strategy.options, strategy.num_replicas
    assert options.local_steps is not None
    period, overlap = options.local_steps // options.fragments, options.overlap_steps
    outer, mix = options.outer_optimizer, options.mixed_share
    lr, momentum = (outer.lr, outer.momentum) if isinstance(outer, Nesterov) else (1.0, 0.0)
    common, replicas = (Replicas(job, entrypoints, n, numerics) for n in (1, count))
    params, buffers = common.params[0], _buffers(common, 0)
    own_buffers = [_buffers(replicas, number) for number in range(count)]
    fragments = fragments_of([param.numel() for param in params], options.fragments)
    velocity, based = ([each.clone() for each in tensors] for tensors in (params, buffers))
    torch._foreach_zero_(velocity)
    result = LocalStepsResult(
        common.models[0].state_dict(), [], [], [], [[] for _ in range(count)], {}
    )
    total = Taken()
    in_flight: list[tuple[int, list[Tensor], list[Tensor], Taken]] = []

    def cut(fragment: int) -> None:
        gradients, changes = [], []
        drifts = result.drifts.setdefault(step, [0.0] * count)
        for place in fragments[fragment]:
            moved = [_wide(params[place]) - _wide(own[place]) for own in replicas.params]
            for number, each in enumerate(moved):
                drifts[number] = math.hypot(drifts[number], each.double().norm().item())
            moved = [in_bits(each, options.outer_bits) for each in moved]
            gradients.append((add_in_tree(moved) / count).to(params[place].dtype))
        for place, old in enumerate(based):
            news = enumerate(own[place] for own in own_buffers)
            changes.append(add_in_tree([change_of(old, new, n, count) for n, new in news]))
        in_flight.append((fragment, gradients, changes, replace(total)))
        if fragment == options.fragments - 1:
            total.loss_sum = total.weight = 0.0

    def apply() -> None:
        fragment, gradients, changes, joined = in_flight.pop()
        for place, gradient in zip(fragments[fragment], gradients, strict=True):
            velocity[place].mul_(momentum).add_(gradient)
            params[place].add_(gradient.add(velocity[place], alpha=momentum), alpha=-lr)
            for own in replicas.params:
                own[place].copy_(torch.add(own[place] * mix, params[place], alpha=1 - mix))
        if fragment < options.fragments - 1:
            return
        for place, (old, change) in enumerate(zip(based, changes, strict=True)):
            mean = change / count if old.is_floating_point() else change
            is_whole = count == 1 and old.is_floating_point()
            old.copy_(change if is_whole else old.double() + mean)
            for every in (buffers, *own_buffers):
                every[place].copy_(old)
        state = common.models[0].state_dict()
        result.states.append({name: tensor.clone() for name, tensor in state.items()})
        result.joined_at.append(step)
        result.losses.append(joined.loss_sum / joined.weight if joined.weight else math.nan)

    for step in range(1, (replicas.num_steps if num_steps is None else num_steps) + 1):
        with torch.enable_grad():
            taken = replicas.take_step(step - 1)
        total.loss_sum, total.weight = total.loss_sum + taken.loss_sum, total.weight + taken.weight
        for number, each in taken.losses.items():
            result.of_replicas[number].append(each)
        is_last = step == replicas.num_steps
        if in_flight and ((step - overlap) % period == 0 or is_last):
            apply()
        ends = [(step // period - 1) % options.fragments] if step % period == 0 else []
        for fragment in range(options.fragments) if is_last else ends:
            cut(fragment)
            if is_last or not overlap:
                apply()
    return result


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
