"""What a user would write: models that do more than compute. They wait, speak, fail, spoil their
parameters or end their process, when they are told to or always."""

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.userland.models import NUM_CLASSES, NUM_FEATURES, dropout_mlp

NO_GATE = "STRATAGEM_TEST_NO_GATE"


class Hooked(nn.Module):
    """Calls a function with the number of training batches so far, before each of them."""

    def __init__(self, act: Callable[[int], None], hidden: int = 16, dropout: float = 0.4) -> None:
        super().__init__()
        self.inner = dropout_mlp(hidden, dropout)
        self._act = act
        self._num_batches = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self._num_batches += 1
            self._act(self._num_batches)
        logits: Tensor = self.inner(x)
        return logits


def paced(pace_s: float, hidden: int = 16, dropout: float = 0.4) -> nn.Module:
    """Takes pace_s seconds per batch, so that a fault can hit a run in its middle."""
    return Hooked(lambda _num: time.sleep(pace_s), hidden, dropout)


def losing_device(reason: str, file: str | None = None) -> nn.Module:
    """Raises at the third batch what torch raises of a lost CUDA device; with a file only unless it
    is there, and makes it before."""

    def act(num: int) -> None:
        if num == 3 and not (file and Path(file).exists()):
            if file:
                Path(file).touch()
            raise torch.AcceleratorError(f"CUDA error: {reason}")

    return Hooked(act)


def deadly(at_batch: int, signum: int = 0) -> nn.Module:
    """Ends its process at a batch, by a signal or by an exit that nobody can catch."""

    def act(num: int) -> None:
        if num == at_batch:
            print("this batch", "is the last one", flush=True)
            if signum == signal.SIGSEGV:
                ctypes.string_at(0)
            elif signum:
                os.kill(os.getpid(), signum)
            os._exit(11)

    return Hooked(act)


class Gate(nn.Module):
    """Says at each training step that it is there, and waits to be let through."""

    def __init__(self, arrive: str, leave: str) -> None:
        super().__init__()
        self.arrive, self.leave = Path(arrive), Path(leave)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.arrive.exists() and NO_GATE not in os.environ:
            self.arrive.write_text("here")  # pipes: both block until the test is at the other end
            self.leave.read_text()
        return x


def gated(arrive: str, leave: str) -> nn.Module:
    return nn.Sequential(*dropout_mlp(), Gate(arrive, leave))


def talkative() -> nn.Module:
    print("building", "a model")
    print("to stderr", file=sys.stderr)
    logging.getLogger("my.model").warning("careful: %d layers", 4)
    return dropout_mlp()


class Talking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        print(f"the user sees {len(x)} rows")
        output: Tensor = self.linear(x)
        return output


def broken_model() -> nn.Module:
    raise KeyError("no such layer")


class Failing(nn.Module):
    def __init__(self, at_call: int) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.num_calls, self.at_call = 0, at_call

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == self.at_call:
            raise KeyError("no such layer")
        output: Tensor = self.linear(x)
        return output


def refused(text: str) -> nn.Module:
    """Raises what it is told to."""
    print(text)
    raise ValueError(text)


class Forgetful(nn.Module):
    """Computes with a number of calls that is in no state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        output: Tensor = self.linear(x) * self.num_calls
        return output


class Idle(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        return output


class Exploding(Failing):
    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        output: Tensor = self.linear(x) * (torch.inf if self.num_calls == self.at_call else 1.0)
        return output


class Stray(nn.Module):
    """Adds the number of its process to a parameter: no two replicas agree."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.mark = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mark.data += os.getpid()
        output: Tensor = self.linear(x)
        return output


class Poisonable(nn.Module):
    """A row above 1000 turns a parameter that the loss does not see into NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.hidden = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 1000:
            self.hidden.data[1] = torch.nan
        output: Tensor = self.linear(x.clamp(-10, 10))
        return output


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.nan


class Told(nn.Module):
    """Counts its forward passes and does as it is told at one of them."""

    def __init__(self, at: int = 0, what: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.extra = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.norm = nn.BatchNorm1d(NUM_FEATURES)
        self.at, self.what, self.num_calls = at, what, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        what = self.what if self.num_calls == self.at else ""
        if what == "raise":
            raise ArithmeticError("as told")
        out: Tensor = self.linear(self.norm(x))
        if what != "leave out":
            out = out + self.extra(x)
        if what == "nan gradient":
            out = _BadGradient.apply(out)  # type: ignore[no-untyped-call]
        return out * torch.nan if what == "nan" else out


class _Misshapen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, torch.ones(3, 3)


class Misshapen(nn.Module):
    """A gradient of a wrong shape, for the weight itself or for what it is made into."""

    def __init__(self, is_direct: bool) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.weight = nn.Parameter(torch.ones(NUM_CLASSES, NUM_FEATURES))
        self._is_direct = is_direct

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self._is_direct else self.weight * 2
        out: Tensor = _Misshapen.apply(self.first(x), weight)  # type: ignore[no-untyped-call]
        return out
