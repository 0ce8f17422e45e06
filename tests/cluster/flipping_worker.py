"""A worker process that computes wrongly: it flips one bit of a tensor at one step.

TEST_FLIPS names a folder; `<worker>.json` in it, read at the begin of each step, is one `Flip`. One
that happens once removes its file. Each flip that has happened is a line of `<worker>.done`.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stratagem.worker.engine.gossip import GossipTrainer
from stratagem.worker.engine.local_steps import LocalStepsTrainer
from stratagem.worker.engine.trainer import Trainer
from stratagem.worker.exchange.shm_all_reduce import Block, SharedTransport
from stratagem.worker.mesh.grpc import GrpcLink
from stratagem.worker.mesh.torch_links import ProcessGroupLink
from stratagem.worker.pipeline.messages import PeerTransport
from stratagem.worker.pipeline.rank_trainer import StageRunner
from stratagem.worker.pipeline.store_transport import StoreTransport
from stratagem.worker.process import main as worker_main

# ---- Flips ----

Place = Literal["activation", "gradient", "sum", "received", "parameter", "moment"]
"""The output of a module; `.grad` before an update; a part of a sum of gradients that this member
computes for all; what came from another member; what an update has changed."""


@dataclass(frozen=True)
class Flip:
    place: Place
    step: int
    element: int
    """Modulo the number of elements that the place has."""
    bit: int
    """Of 32; of each longer element, those of its first 32."""
    once: bool = True
    call: int = 0
    """The occasion in the step: the number of the module's call, of the message or of the block."""

    def write(self, folder: Path, worker: str) -> None:
        """Make the worker flip."""
        file = folder / f"{worker}.json"
        part = file.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.rename(file)


def took_place(folder: Path, worker: str) -> int:
    """Return how often the worker has flipped; the flip ends."""
    (folder / f"{worker}.json").unlink(missing_ok=True)
    done = folder / f"{worker}.done"
    number = len(done.read_text().splitlines()) if done.exists() else 0
    done.unlink(missing_ok=True)
    return number


def flip(tensors: Iterable[Tensor], element: int, bit: int) -> bool:
    """Flip a bit of the element of this number in all tensors; return False if there is none."""
    words = [each for each in map(words_of, tensors) if each is not None and each.numel()]
    if not words:
        return False
    at = element % sum(each.numel() for each in words)
    for each in words:
        if at < each.numel():
            each[at].bitwise_xor_(1 << bit if bit < 31 else -(1 << 31))
            return True
        at -= each.numel()
    raise AssertionError("unreachable")


def words_of(tensor: Tensor) -> Tensor | None:
    """Return the first words of the elements of a float, else the words of the bytes."""
    if not tensor.is_contiguous() or tensor.nbytes < 4:
        return None
    flat = tensor.data.reshape(-1)  # not detach(): autograd must not know
    if not flat.is_floating_point():
        flat = flat.view(torch.uint8)
        flat = flat[: flat.numel() // 4 * 4]
    if flat.storage_offset() * flat.element_size() % 4:
        return None
    words = flat.view(torch.int32)
    return words[:: flat.element_size() // 4] if flat.element_size() > 4 else words


def floats(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors of floats among the values, without counters."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1:
            yield value


# ---- The fault of one worker ----


class Fault:
    """The flip that is due in the present step; its places ask for it from any thread."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._file, self._done = folder / f"{worker}.json", folder / f"{worker}.done"
        self._lock = threading.Lock()
        self._flip: Flip | None = None
        self._num_calls = 0

    def begin(self, step: int) -> None:
        """Begin a step, perhaps again."""
        try:
            flip_ = Flip(**json.loads(self._file.read_text()))
        except FileNotFoundError:
            flip_ = None
        with self._lock:
            self._flip = flip_ if flip_ is not None and flip_.step == step else None
            self._num_calls = 0

    def reach(self, place: Place, tensors: Iterable[Tensor]) -> bool:
        """Flip in these tensors if that is due here; at most once in a step. Return True if so."""
        with self._lock:
            due = self._flip
            if due is None or due.place != place:
                return False
            self._num_calls += 1
            if self._num_calls <= due.call or not flip(tensors, due.element, due.bit):
                return False
            self._flip = None
            if due.once:
                self._file.unlink(missing_ok=True)
            with self._done.open("a") as done:
                done.write(f"{due.step}\n")
            return True


# ---- Places ----


def wrapped(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replace a method: around(the method, its object, its arguments)."""
    method = getattr(owner, name)

    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(partial(method, self), self, *args, **kwargs)

    setattr(owner, name, replacement)


def install(fault: Fault) -> None:
    """Make all places of this process ask the fault."""

    def train_step(method: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        fault.begin(trainer.step + 1)
        return method(*args, **kwargs)

    for trainer in (Trainer, GossipTrainer, LocalStepsTrainer, StageRunner):
        wrapped(trainer, "train_step", train_step)
    _compute(fault)
    _receive(fault)


def _compute(fault: Fault) -> None:
    def before(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        fault.reach("gradient", floats(param.grad for param in _params(optimizer)))

    def after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        fault.reach("parameter", floats(_params(optimizer)))
        state = (value for value in optimizer.state.values() if isinstance(value, Mapping))
        fault.reach("moment", floats(chain.from_iterable(each.values() for each in state)))

    def forward(module: nn.Module, _args: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled() and not any(module.children()):
            fault.reach("activation", floats([output]))

    def add(method: Callable[..., Any], block: Block, *args: Any) -> None:
        method(*args)
        if not block.is_extras and fault.reach("sum", floats([block.total])):
            for copy in block.copies:
                copy.copy_(block.total)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    register_module_forward_hook(forward)
    wrapped(Block, "run", add)


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


class Received:
    """A receive in progress, of which a bit may be flipped at its end."""

    def __init__(self, work: Any, tensor: Tensor, fault: Fault) -> None:
        self._work, self._tensor, self._fault = work, tensor, fault

    def wait(self, timeout_s: float) -> None:
        self._work.wait(timeout_s)
        self._fault.reach("received", [self._tensor])


def _receive(fault: Fault) -> None:
    def recv(
        method: Callable[..., Any], _link: Any, peer: int, tag: int, tensor: Tensor
    ) -> Received:
        return Received(method(peer, tag, tensor), tensor, fault)

    def message(method: Callable[..., Any], _transport: Any, *args: Any) -> Any:
        come = method(*args)
        fault.reach("received", floats(come.tensors))
        return come

    def finish(method: Callable[..., Any], transport: Any) -> None:
        method()
        fault.reach("received", floats(transport._sets[transport._party.rank][0][:-1]))

    wrapped(ProcessGroupLink, "recv", recv)
    wrapped(GrpcLink, "recv", recv)
    wrapped(PeerTransport, "recv", message)
    wrapped(StoreTransport, "recv", message)
    wrapped(SharedTransport, "finish", finish)


if __name__ == "__main__":
    install(Fault(Path(os.environ["TEST_FLIPS"]), sys.argv[sys.argv.index("--name") + 1]))
    sys.exit(worker_main.main(sys.argv[1:]))
