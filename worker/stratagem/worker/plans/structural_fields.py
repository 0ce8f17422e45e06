"""Which values of a job decide what its state is made of, found by building the job with others.

Models are built on the meta device, optimizers over parameters of a few numbers. A state is made of
the names, shapes and types of the model's tensors, which of them are trained or tied, and what the
optimizer keeps for each: one that raises over a state of the other cannot go on from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from stratagem.common.base.errors import StratagemError
from stratagem.common.job import JobSpec, OptimizerSpec, with_fields
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine.optim.optimizers import make_optimizer
from stratagem.worker.engine.step.state_format import load_optimizer_state, optimizer_state
from stratagem.worker.models.model_builder import build_shapes
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code

_META = torch.device("meta")

Layout: TypeAlias = list[tuple[object, ...]]


def structural(
    work: ExecutionContext, model: nn.Module, variants: Iterable[pb.Variant]
) -> list[str]:
    """The names of the variants of the job whose state is of other things than its own.

    model: as the job trains it.
    """
    found: dict[str, None] = {}
    own, entrypoints = work.job, work.host.entrypoints
    dims = sorted({param.dim() for param in model.parameters() if param.requires_grad})
    own_layout: Layout | None = None
    for variant in variants:
        work.control.check()
        if variant.name in found:
            continue
        try:
            changed = with_fields(own, json.loads(variant.fields_json))
            is_other = not go_on(own.optimizer, changed.optimizer, dims)
            if changed.model != own.model:
                own_layout = own_layout or layout_of(own, entrypoints)
                is_other = is_other or layout_of(changed, entrypoints) != own_layout
        except StratagemError:
            continue  # a value that cannot be built is no state that anybody could copy
        if is_other:
            found[variant.name] = None
    return list(found)


def layout_of(job: JobSpec, entrypoints: EntryPoints) -> Layout:
    """Of every tensor of the model's state: name, type, shape, whether it is trained, and the first
    name of those that it is tied to. Raises StratagemError where it cannot be built."""
    with user_code("building the model"):
        model = build_shapes(job, entrypoints, device=_META)
    first: dict[int, str] = {}
    tensors = sorted(model.state_dict(keep_vars=True).items())
    return [
        (name, each.dtype, each.shape, each.requires_grad, first.setdefault(id(each), name))
        for name, each in tensors
    ]


def go_on(one: OptimizerSpec, other: OptimizerSpec, dims: Sequence[int]) -> bool:
    """Whether each of two optimizers can go on from what the other one has kept for parameters of
    these numbers of dimensions. Raises StratagemError where one cannot be made."""
    return one == other or (_goes_on(one, other, dims) and _goes_on(other, one, dims))


def _goes_on(old: OptimizerSpec, new: OptimizerSpec, dims: Sequence[int]) -> bool:
    """Whether the new optimizer can make a step from what the old one has kept."""
    before, after = _params(dims), _params(dims)
    first = make_optimizer(old, [param for _, param in before])
    second = make_optimizer(new, [param for _, param in after])
    first.step()
    load_optimizer_state(second, after, *optimizer_state(first, before))
    try:
        second.step()
    except Exception:  # whatever an optimizer raises that misses something
        return False
    return True


def _params(dims: Sequence[int]) -> list[tuple[str, nn.Parameter]]:
    """Two numbers along each dimension, and a gradient."""
    params = [(str(dim), nn.Parameter(torch.ones([2] * dim))) for dim in dims]
    for _, param in params:
        param.grad = torch.ones_like(param)
    return params
