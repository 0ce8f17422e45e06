"""Builds the model of a job: once for real, from the seed, and elsewhere empty, to be loaded.

An empty model is built on the meta device, so no memory is touched and nothing is initialised.
A factory that cannot do that (it reads values, or keeps tensors that are no part of the state) is
run for real instead. Must not know training.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import _disable_current_modes

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.job.optimizer import check_groups, is_matched
from stratagem.common.job.turns import check_turn_parameters
from stratagem.worker.models.file_storage import FileStorage
from stratagem.worker.models.graph_model import graph_module
from stratagem.worker.models.model_dtypes import convert
from stratagem.worker.models.model_fit import checks_of_the_model
from stratagem.worker.models.model_tensors import check_tensors, memory_of
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code

_PLAIN: Final = (bool, int, float, str, type(None))
_ACTIVITY: Final = "building the model"
_NUM_NAMES: Final = 5
"""How many names of parameters a refusal lists."""


def build_model(
    job: JobSpec,
    entrypoints: EntryPoints,
    *,
    device: torch.device,
    fresh: bool,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> nn.Module:
    """fresh: initialised from the seed. Otherwise its state is still undefined.

    folder: large tensors lie in files there instead of memory; the bits are the same. say: is given
    a sentence about tensors whose dtype the job's precision has changed, if there are any.
    """
    factory, changes = _factory(job, entrypoints), ""

    def made() -> nn.Module:
        nonlocal changes
        model = factory()
        changes = convert(model, job)
        return model

    with nullcontext() if folder is None else FileStorage(folder):
        model = _build(made, job.seed, device, fresh=fresh)
    if changes:
        say(changes)
    return model


def _build(
    factory: Callable[[], nn.Module], seed: int, device: torch.device, *, fresh: bool
) -> nn.Module:
    if not fresh:
        empty = _build_empty(factory, device)
        if empty is not None:
            return empty
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        # Without a device torch keeps a stack trace of each call for when there is one: 10 ms.
        torch.cuda.manual_seed_all(seed)
    with user_code(_ACTIVITY):
        model = factory()
    return model.to(device)


def build_shapes(job: JobSpec, entrypoints: EntryPoints, *, device: torch.device) -> nn.Module:
    """The model with parameters and buffers of no values; to be called where tensors are fake.

    Made outside of fake tensors: on the meta device, or for real where the factory wants that.
    """
    factory = _factory(job, entrypoints)
    with _disable_current_modes():
        model = _build_meta(factory)
        if model is None or _hides_any(model):
            with user_code(_ACTIVITY):
                model = factory()
        convert(model, job)
    _materialise(model, device)
    return model


def _factory(job: JobSpec, entrypoints: EntryPoints) -> Callable[[], nn.Module]:
    spec = job.model
    if spec.entrypoint is not None:
        build = entrypoints.bind(spec.entrypoint, spec.kwargs, "model")
    elif spec.graph is not None:
        build = partial(graph_module, spec.graph)
    else:
        raise InvalidInputError.at("model", "names neither an entrypoint nor a graph")
    by = "the graph" if spec.entrypoint is None else f'"{spec.entrypoint}"'
    return lambda: _as_trained(_checked(build(), by), job)


@checks_of_the_model()
def _as_trained(model: nn.Module, job: JobSpec) -> nn.Module:
    """Freezes what the job does not train, and checks that each group of the optimizer holds
    something."""
    params = list(model.named_parameters())
    for i, pattern in enumerate(job.model.freeze or ()):
        frozen = [param for name, param in params if is_matched(name, (pattern,))]
        if not frozen:
            names = ", ".join(name for name, _ in params[:_NUM_NAMES])
            text = f"{pattern!r} fits no parameter; the first are {names or 'none'}"
            raise InvalidInputError.at(f"model.freeze[{i}]", text)
        for param in frozen:
            param.requires_grad_(False)
    trained = [(name, param.dim()) for name, param in params if param.requires_grad]
    if job.turns is not None:
        check_turn_parameters(job.turns, trained)
    elif not job.only_evaluates:
        check_groups(job.optimizer, trained)
    return model


def _checked(model: object, by: str) -> nn.Module:
    """Return what a factory has made, if it is a model; by: its name."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise InvalidInputError.at("model", f"{by} returned a {kind}, not a torch.nn.Module")
    check_tensors(model)
    return model


def _build_meta(factory: Callable[[], nn.Module]) -> nn.Module | None:
    try:
        with torch.device("meta"):
            return factory()
    except (RuntimeError, TypeError):  # the factory reads values, which meta tensors do not have
        return None


def _build_empty(factory: Callable[[], nn.Module], device: torch.device) -> nn.Module | None:
    model = _build_meta(factory)
    if model is None or _shares_memory(model):
        return None
    if not all(_can_be_empty(module) for module in model.modules()):
        return None
    _materialise(model, device)
    return None if _hides_any(model) else model


def _can_be_empty(module: nn.Module) -> bool:
    """Return whether a module is whole once the tensors of its state are loaded into another one's
    parameters: without hooks, a class, or attributes of theirs but plain values, which are copied,
    and without parametrizations, which make other tensors on the meta device."""
    if module._non_persistent_buffers_set or is_parametrized(module):
        return False
    params = [param for param in module._parameters.values() if param is not None]
    return not any(
        param._backward_hooks
        or param._post_accumulate_grad_hooks
        or len(_plain_attributes(param)) < len(vars(param))
        or type(param) is not nn.Parameter
        for param in params
    )


def _plain_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that were set on a tensor to plain values, such as `is_tp = True`."""
    return {name: value for name, value in vars(tensor).items() if type(value) in _PLAIN}


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Gives every parameter and buffer storage; those that were tied stay tied."""
    made: dict[int, Tensor] = {}

    def twin(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = _empty_like(tensor, device)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            vars(empty).update(_plain_attributes(tensor))
            made[id(tensor)] = empty
        return made[id(tensor)]

    held: list[Tensor] = []  # keeps ids unique while we replace
    for module in model.modules():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                held.append(tensor)
                # setattr, because RNNs keep a second list of their weights in step with it.
                setattr(module, key, twin(tensor))


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.layout is torch.strided and tensor.is_contiguous():
        # For one on the meta device empty_like imports a system of computer algebra, for seconds.
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_like(tensor, device=device)


def _shares_memory(model: nn.Module) -> bool:
    """Return whether different parameters or buffers lie in one piece of memory, as `_materialise`
    would not leave them."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    dense = [each for each in tensors.values() if each.layout is torch.strided]
    return len({memory_of(each) for each in dense}) < len(dense)


def _hides_any(model: nn.Module) -> bool:
    """Return whether modules hold tensors of the meta device outside of their parameters and
    buffers, also in functions that they keep, such as hooks."""
    for module in model.modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            if any(tensor.is_meta for tensor in _tensors(value)):
                return True
    return False


def _tensors(value: Any) -> Iterator[Tensor]:
    match value:
        case Tensor():
            yield value
        case list() | tuple() | set():
            for item in value:
                yield from _tensors(item)
        case dict():
            for item in value.values():
                yield from _tensors(item)
        case partial():
            yield from _tensors([value.args, value.keywords])
        case FunctionType():
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # it is not set yet
                    held = cell.cell_contents
                    if isinstance(held, Tensor):
                        yield held
