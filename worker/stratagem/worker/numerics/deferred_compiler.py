"""Prevent torch's optimizers from importing torch's compiler, which takes 0.7 s, before a step.

torch excludes its compiler from some methods of optimizers, and for that imports all of it at their
first call, even where nothing is ever compiled. Until somebody imports the compiler, these methods
are called directly, and from then on as torch calls them. Nothing is changed where torch is not
built as expected.
"""

import sys
from collections.abc import Callable
from typing import Any, Final

import torch

GUARDED: Final = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
COMPILER: Final = "torch._dynamo"
CHOSEN: Final = "__dynamo_disable"
"""Attribute in which torch's wrapper of an optimizer method caches the function that it calls."""


def defer_compiler() -> None:
    """Let optimizers be made, zeroed, saved and loaded without importing torch's compiler."""
    for name in GUARDED:
        guard = getattr(torch.optim.Optimizer, name)
        method = getattr(guard, "__wrapped__", None)
        if method is not None and not hasattr(method, CHOSEN):
            setattr(method, CHOSEN, _until_compiler(guard, method))


def _until_compiler(guard: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if COMPILER not in sys.modules:
            return method(*args, **kwargs)
        if getattr(method, CHOSEN, None) is call:
            delattr(method, CHOSEN)
        return guard(*args, **kwargs)

    return call
