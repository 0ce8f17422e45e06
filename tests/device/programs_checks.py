"""Checks of what is computed elementwise: Triton's programs, and optimizers over pieces."""

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tests.device.check_table import SkippedError
from tests.repository import ROOT

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9}),
}
FUSED = ("sgd", "adam", "adamw", "adagrad")
SIZES = (4096, 1000, 7, 1)
PIECE = 32
"""Slices of parameters are multiples of this many elements."""
STEPS = 200


def kernels(device: torch.device) -> str:
    """The tests of the programs themselves; on a CPU a few of them, by triton's interpreter."""
    if find_spec("triton") is None:
        raise SkippedError("triton is not installed")
    chosen = ["-k", "test_signs or test_sums"] if device.type == "cpu" else []
    return tested("tests/worker/kernels", *chosen)


def marked(device: torch.device) -> str:
    if device.type == "cpu":
        raise SkippedError("they need a CUDA device")
    return tested("tests/worker", "-m", "gpu")


def tested(*chosen: str) -> str:
    """Run tests and return pytest's last line; some must have run, and all of those passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *chosen]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = ran.stdout.strip().splitlines()[-1]
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert "passed" in last, last
    return last


def pieces(device: torch.device) -> str:
    """Every optimizer over pieces that end at multiples of 32, beside whole parameters, one type
    and way of computing after the other."""
    compared = 0
    for name, (make, settings) in OPTIMIZERS.items():
        for way in ("foreach", "fused"):
            if way == "fused" and name not in FUSED:
                continue
            for dtype in (torch.float32, torch.bfloat16):
                whole = _stepped(make, settings | {way: True}, dtype, device, piece=None)
                cut = _stepped(make, settings | {way: True}, dtype, device, piece=PIECE)
                assert torch.equal(whole, cut), f"{name}, {way}, {dtype}"
                compared += 1
    return f"{compared} ways of {len(OPTIMIZERS)} optimizers, {STEPS} steps"


def _stepped(
    make: Callable[..., torch.optim.Optimizer],
    settings: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    piece: int | None,
) -> Tensor:
    """Parameters of all sizes after the steps, each cut in two at a multiple of `piece`."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(n, generator=generator).to(device, dtype) for n in SIZES]
    parts = [part for value in values for part in _cut(value, piece)]
    parameters = [torch.nn.Parameter(part.clone()) for part in parts]
    optimizer = make(parameters, lr=1e-2, **settings)
    for _ in range(STEPS):
        gradients = [torch.randn(n, generator=generator).to(device, dtype) for n in SIZES]
        cut = (part for gradient in gradients for part in _cut(gradient, piece))
        for parameter, gradient in zip(parameters, cut, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])


def _cut(value: Tensor, piece: int | None) -> list[Tensor]:
    if piece is None or value.numel() <= piece:
        return [value]
    middle = value.numel() // (3 * piece) * piece or piece
    return [value[:middle], value[middle:]]
