"""A worker process that computes wrongly: it flips one bit of a tensor at one step.

TEST_FLIPS names a folder; `<worker>.json` in it, read at each step, is one flip:
{"place": "gradient" | "parameter" | "moment", "step": 5, "element": 17, "bit": 3, "once": true}.
A flip that happens once removes its file.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratagem.worker.engine import apply_step as engine
from stratagem.worker.process import main as worker_main

Apply = Callable[..., engine.Applied]
NAME = engine.apply_step.__name__


def flip(tensors: list[Tensor], element: int, bit: int) -> None:
    """Flip a bit of the element of this number, modulo the number of elements, in all tensors."""
    at = element % sum(tensor.numel() for tensor in tensors)
    for tensor in tensors:
        if at < tensor.numel():
            flat = tensor.detach().view(-1)
            mask = torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            flat[at : at + 1].view(torch.int32).bitwise_xor_(mask)
            return
        at -= tensor.numel()


def floats(values: Iterator[Any]) -> list[Tensor]:
    return [
        value
        for value in values
        if isinstance(value, Tensor) and value.dtype == torch.float32 and value.numel()
    ]


def due(file: Path, step: int | None) -> dict[str, Any] | None:
    """The flip of this step, if there is one; one that happens once is removed."""
    try:
        flip_ = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return None
    if flip_["step"] != step:
        return None
    if flip_["once"]:
        file.unlink(missing_ok=True)
    return dict(flip_)


def flipping(apply: Apply, file: Path) -> Apply:
    @functools.wraps(apply)
    def wrong(summary: Any, policy: Any, place: engine.StepPlace, **more: Any) -> engine.Applied:
        now = due(file, place.number)
        if now is not None and now["place"] == "gradient":
            flip(floats(param.grad for param in policy.params), now["element"], now["bit"])
        applied = apply(summary, policy, place, **more)
        if now is not None and now["place"] == "parameter":
            flip(floats(iter(policy.params)), now["element"], now["bit"])
        if now is not None and now["place"] == "moment":
            kept = (value for each in policy.optimizer.state.values() for value in each.values())
            flip(floats(value for value in kept if value.numel() > 1), now["element"], now["bit"])
        return applied

    return wrong


if __name__ == "__main__":
    name = sys.argv[sys.argv.index("--name") + 1]
    right = engine.apply_step
    wrong = flipping(right, Path(os.environ["TEST_FLIPS"], f"{name}.json"))
    for module in list(sys.modules.values()):
        if vars(module).get(NAME) is right and module is not engine:
            vars(module)[NAME] = wrong
    sys.exit(worker_main.main(sys.argv[1:]))
