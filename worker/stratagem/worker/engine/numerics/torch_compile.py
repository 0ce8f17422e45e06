"""Running a module's forward pass as compiled code (torch.compile with inductor).

Shapes are compiled as they are, so the bits of a computation depend on its shape and on nothing
that was computed before. Only full batches are compiled: what is left over at the end of an epoch,
and evaluation between steps, run eagerly, so uneven shards compile no further code. Random numbers
are torch's own, drawn from the same seeds as in eager code. Must not know what a model is.
"""

import importlib.util
import inspect
import warnings
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import ExecutionSpec
from stratagem.worker.engine.numerics.fingerprint import find_compiler
from stratagem.worker.engine.numerics.keyed_randomness import Draws, KeyedRandomness
from stratagem.worker.engine.numerics.mixed_precision import Forward

MAX_SHAPES: Final = 64
"""Most input shapes of one piece of compiled code; each costs a compilation."""


@dataclass(slots=True)
class CompileGate:
    """The switch between compiled and eager code, alike on all members: it follows the batch."""

    is_open: bool = False
    is_inference: bool = False
    """Whether forward passes without gradients are compiled too: there are no others."""


def check_compiler(mode: str, device: torch.device) -> None:
    """Raises InvalidInputError on a worker that cannot compile.

    It is not a reason to run eagerly: that has other bits than the other members' compiled code.
    """
    missing = _missing(device)
    if missing is not None:
        raise InvalidInputError.at(
            "execution.mode",
            f"{mode} needs {missing}, which this worker does not have; "
            "install it on every worker, or choose Eager",
        )


def _missing(device: torch.device) -> str | None:
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton"
    return None if find_compiler() else "a C++ compiler (such as g++)"


def prepare_compiler(device: torch.device) -> None:
    """Settings of the process; all of it is loaded on first use only."""
    import torch._dynamo.config
    import torch._inductor.config

    # Where code is interrupted, dynamo looks at what passes the border.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    # Otherwise the limit is followed by silently eager code, whose bits are others.
    torch._dynamo.config.recompile_limit = MAX_SHAPES
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if device.type == "cpu":
        # Without a pool of compiler processes for every worker.
        torch._inductor.config.compile_threads = 1


def compiled(
    module: nn.Module,
    forward: Forward,
    gate: CompileGate,
    spec: ExecutionSpec,
    randomness: KeyedRandomness,
) -> Forward:
    """The module's forward pass, compiled while the gate is open and what the job computes is
    computed: gradients, or no gradients."""
    options: dict[str, Any] = {
        "fallback_random": True,
        # It may draw random numbers in another order than the model's code does.
        "reorder_for_peak_memory": False,
        **({} if spec.fusion else {"max_fusion_size": 1}),
    }
    fast: Forward = torch.compile(forward, dynamic=False, options=options, **_isolation())
    known: list[Draws] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not (gate.is_open and (gate.is_inference or torch.is_grad_enabled())):
            return forward(*args, **kwargs)
        if not known:
            known.append(_observe(module, forward, randomness, args, kwargs))
        result = fast(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1:
            randomness.catch_up(known[0])
        return result

    return run


def _isolation() -> dict[str, Any]:
    """Modules of a class share one code object; where torch can, each has a limit of its own."""
    wanted = {"recompile_limit": MAX_SHAPES, "isolate_recompiles": True}
    known = inspect.signature(torch.compile).parameters
    return {name: value for name, value in wanted.items() if name in known}


def _observe(
    module: nn.Module, forward: Forward, randomness: KeyedRandomness, args: Any, kwargs: Any
) -> Draws:
    """Observes what the module draws at random, in an eager run that leaves no trace."""
    buffers: list[Tensor] = list(module.buffers())
    before = [buffer.clone() for buffer in buffers]
    with torch.no_grad():
        try:
            return randomness.observe(module, lambda: forward(*args, **kwargs))
        finally:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
