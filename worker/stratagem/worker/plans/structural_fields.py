"""Finds the values of a job that decide its state's structure, by building it with other values.

Models are built on the meta device, optimizers over parameters of a few numbers. A state is made of
the names, shapes and types of the model's tensors, which of them are trained or tied, and what the
optimizer keeps for each: one that raises over a state of the other cannot continue from it.
"""

import json
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from stratagem.common.base.errors import StratagemError
from stratagem.common.job import JobSpec, OptimizerSpec, with_fields
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine.optim.optimizers import make_optimizer, update
from stratagem.worker.engine.step.state_format import load_optimizer_state, optimizer_state
from stratagem.worker.models.model_builder import build_shapes
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code

_META = torch.device("meta")
_NOTHING_ALLOWED = EntryPoints([])

Layout: TypeAlias = list[tuple[object, ...]]


def structural(
    work: ExecutionContext, model: nn.Module, variants: Iterable[pb.Variant]
) -> list[str]:
    """Return the names of the variants of the job whose state has another structure than its own.

    model: as the job trains it.
    """
    names: dict[str, None] = {}
    own, entrypoints = work.job, work.entrypoints
    trained = [
        (name, param.dim()) for name, param in model.named_parameters() if param.requires_grad
    ]
    own_layout: Layout | None = None
    for variant in variants:
        work.control.check()
        if variant.name in names:
            continue
        try:
            changed = with_fields(own, json.loads(variant.fields_json))
            is_other = not go_on(own.optimizer, changed.optimizer, trained, entrypoints)
            if changed.model != own.model:
                own_layout = own_layout or layout_of(own, entrypoints)
                is_other = is_other or layout_of(changed, entrypoints) != own_layout
        except StratagemError:
            continue  # a value that cannot be built is no state that anybody could copy
        if is_other:
            names[variant.name] = None
    return list(names)


def layout_of(job: JobSpec, entrypoints: EntryPoints) -> Layout:
    """Return the layout of the model's state: a tuple for each tensor, sorted by name.

    Each has name, type, shape, whether it is trained, and the first name of those that it is tied
    to. Raises StratagemError where the model cannot be built.
    """
    with user_code("building the model"):
        model = build_shapes(job, entrypoints, device=_META)
    first: dict[int, str] = {}
    tensors = sorted(model.state_dict(keep_vars=True).items())
    return [
        (name, tensor.dtype, tensor.shape, tensor.requires_grad, first.setdefault(id(tensor), name))
        for name, tensor in tensors
    ]


def go_on(
    one: OptimizerSpec,
    other: OptimizerSpec,
    params: Sequence[tuple[str, int]],
    entrypoints: EntryPoints = _NOTHING_ALLOWED,
) -> bool:
    """Return whether each of two optimizers can continue from the state that the other has kept.

    params: names and numbers of dimensions. Raises StratagemError where one cannot be made.
    """
    if one == other:
        return True
    mine, theirs = _by_group(one), _by_group(other)
    if mine.keys() != theirs.keys():
        return False
    pairs = {(one.group_of(*param), other.group_of(*param), param[1]) for param in params}
    return all(
        _goes_on(mine[own], theirs[others], dims, entrypoints)
        and _goes_on(theirs[others], mine[own], dims, entrypoints)
        for own, others, dims in sorted(pairs)
    )


def _by_group(spec: OptimizerSpec) -> dict[str, OptimizerSpec]:
    """Return the optimizer of each group, with the values of that group."""
    return {
        name: OptimizerSpec.model_validate(each.of_group(name).document())
        for each in spec.rules()
        for name in each.groups
    }


def _goes_on(old: OptimizerSpec, new: OptimizerSpec, dims: int, entrypoints: EntryPoints) -> bool:
    """Return whether the new optimizer can make a step from the state that the old one has kept."""
    before, after = _params(dims), _params(dims)
    first = make_optimizer(old, before, entrypoints=entrypoints)
    second = make_optimizer(new, after, entrypoints=entrypoints)
    update(first)
    load_optimizer_state(second, after, *optimizer_state(first, before))
    try:
        update(second)
    except Exception:  # of any type, from an optimizer that misses something
        return False
    return True


def _params(dims: int) -> list[tuple[str, nn.Parameter]]:
    """Return a parameter of so many dimensions, of size 2 along each, with a gradient."""
    param = nn.Parameter(torch.ones([2] * dims))
    param.grad = torch.ones_like(param)
    return [("weight", param)]
