"""The control variates of SCAFFOLD, option II (Karimireddy et al., 2020, arXiv:1910.06378).

The global state holds c beside the model, each client keeps c_k, and both begin at zero. A client
takes K steps of rate lr with c - c_k added to its gradient, from x to y; then

    c_k+ = c_k - c + (x - y) / (K lr)        Δc = c_k+ - c_k

in float64, each rounded once, so that c_k+ is the client's mean gradient in the round. Δc goes with
the update. Tensors are named `control/` and the parameter; tied parameters have one.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated
from stratagem.common.tensors.manifest import CONTROL
from stratagem.worker.engine.step.callbacks import Callbacks
from stratagem.worker.engine.step.state_format import MODEL
from stratagem.worker.engine.trainers.federated_client import ClientRound

_CONTROL_FIELD: Final = "strategy.options.control"
_EXACT: Final = (torch.float32, torch.float64)


def is_controlled(job: JobSpec) -> bool:
    """Return whether the steps of clients are corrected."""
    return isinstance(job.strategy, Federated) and job.strategy.options.control is not None


def check_control(job: JobSpec, model: nn.Module, callbacks: Callbacks) -> None:
    """Check that steps tell the gradient: it is nobody else's to change, and wide enough. Raises
    InvalidInputError."""
    if not is_controlled(job):
        return
    if callbacks.takes_gradients:
        text = "scaffold measures gradients by steps, and on_gradients of callbacks changes them"
        raise InvalidInputError.at(_CONTROL_FIELD, f"{text}; leave one out")
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype not in _EXACT:
            text = f"{name} is {param.dtype}, whose steps are too coarse to measure a gradient by"
            raise InvalidInputError.at(_CONTROL_FIELD, f"{text}; float32 and float64 are not")


def control_zeros(model: nn.Module) -> dict[str, Tensor]:
    """Return c as it begins, of each trained parameter."""
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {f"{CONTROL}{n}": torch.zeros_like(p, device="cpu").detach() for n, p in trained}


def control_begun(base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return c_k as it begins. base: a global state."""
    return {name: torch.zeros_like(base[name]) for name in _names(base)}


def correction(base: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return c - c_k by parameter. own: c_k."""
    return {name.removeprefix(CONTROL): base[name] - own[name] for name in own}


def control_moved(
    base: Mapping[str, Tensor], own: Mapping[str, Tensor], done: ClientRound
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return c_k after the round, and Δc. A client whose steps had a rate of zero has learned
    nothing of its gradient, and keeps what it had."""
    moved, changed = {}, {}
    for name in _names(base):
        before, param = own[name], name.removeprefix(CONTROL)
        reach = done.reach[param]
        if reach:
            way = base[f"{MODEL}{param}"].double() - done.tensors[f"{MODEL}{param}"].double()
            moved[name] = (before.double() - base[name].double() + way / reach).to(before.dtype)
        else:
            moved[name] = before.clone()
        changed[name] = (moved[name].double() - before.double()).to(before.dtype)
    return moved, changed


def _names(tensors: Iterable[str]) -> list[str]:
    return [name for name in tensors if name.startswith(CONTROL)]
