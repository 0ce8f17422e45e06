"""Seed random numbers by the computation, independent of the worker and of earlier computations.

Before every module that may draw random numbers the default generator is seeded with a key of
(seed, step, shard, micro-batch; module name; number of the call). So a dropout mask is the same
whichever worker computes the shard. If nothing draws, as in most evaluations, seeding would cost a
tenth of the time of a small model. So a computation that can be repeated is first tried without
seeding: if the generators are unchanged afterwards, nothing has drawn from them, and the results
are the same as with seeding.
"""

import hashlib
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stratagem.common.numerics.keys import POSITIVE, mix, mix_on, text_number
from stratagem.worker.data.rows import seed_users_generators
from stratagem.worker.models.program import draws_random_numbers, runs_only_known_code

# ---- Keyed randomness ----


@dataclass(slots=True)
class _Hook:
    """Forward hook that seeds the generators before each call of a module. Compiled code is
    interrupted (by a graph break) only for hooks that are not idle."""

    owner: "KeyedRandomness"
    name_key: int
    is_idle: bool = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            self.owner._before_call(self.name_key)
        elif not self.is_idle:
            self.owner._border(self.name_key)


@dataclass(frozen=True, slots=True)
class Draws:
    """The effect that idle hooks, which compiled code skips, would have had on the generators in
    one run of a module."""

    skipped: Mapping[int, int]
    """The number of calls of modules with idle hooks, keyed by a hash of the module's name."""
    last: int | None
    """The module that was seeded last, if its hook is idle; else None."""


class KeyedRandomness:
    """Seeds the generators of a model's device by the computation, through hooks."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._is_known = runs_only_known_code(model)
        self._prefix: int | None = None
        """Hash of the computation's key, the beginning of every module's key."""
        self._num_calls: dict[int, int] = {}
        self._keys: dict[tuple[int, int], int] = {}
        self._latest: int | None = None
        self._hooks: dict[nn.Module, _Hook] = {}
        self._border: Callable[[int], None] = self._before_call
        self._registered: list[tuple[nn.Module, int, _Hook]] = []
        self._resting: list[tuple[nn.Module, int, _Hook]] = []
        """Hooks taken off their modules, since even a call that only returns takes 3 µs."""
        self._may_rest = True
        self._untouched: list[Tensor] | None = None
        """States of the generators at the beginning of a trial; None outside of trials."""
        for name, module in model.named_modules():
            if draws_random_numbers(module):
                hook = self._hooks[module] = _Hook(self, text_number(name))
                handle = module.register_forward_pre_hook(hook)
                self._registered.append((module, handle.id, hook))

    def begin(self, *key: int | str, forget: bool = True, is_users: bool = True) -> None:
        """Start the computation named by `key`: a shard of a step, or a batch of an evaluation.

        forget: False if the backward of an earlier computation is still to come. is_users: False if
        no user's code runs besides the model.
        """
        self._wake()
        seed = mix(*key)
        self._prefix = mix(seed)
        self._num_calls.clear()
        if forget:
            self._keys.clear()
        self._seed(seed)
        if is_users or not self._is_known:
            # Only the user's code draws from these two generators, whose seeding takes 15 µs.
            seed_users_generators(seed)

    def begin_trial(self, *key: int | str) -> None:
        """Start a computation like `begin`, but without seeding modules until a trial has failed.

        The caller then calls `has_failed`, and repeats the computation if that is true.
        """
        if not self._may_rest:
            self.begin(*key)
            return
        self._rest()
        self._prefix = None  # for hooks that could not be removed
        seed = mix(*key)
        self._seed(seed)
        seed_users_generators(seed)
        self._untouched = [generator.get_state() for generator in self._generators]

    def has_failed(self) -> bool:
        """Return whether the trial has drawn random numbers, so that it must be repeated with
        seeding. After a failure `begin_trial` is the same as `begin`."""
        if self._untouched is None:
            return False
        pairs = zip(self._generators, self._untouched, strict=True)
        self._may_rest = all(torch.equal(rng.get_state(), before) for rng, before in pairs)
        self._untouched = None
        return not self._may_rest

    def end(self) -> None:
        """End the computation: modules are not seeded any more."""
        self._prefix = None

    def allow_compiled_code(self) -> None:
        """Prepare the hooks for compiled code; called before compiling."""
        self._border = torch.compiler.disable(self._before_call)
        self._may_rest = False

    def observe(self, module: nn.Module, run: Callable[[], object]) -> Draws:
        """Run a module to observe which seeds are used, and undo all effects; return the draws.

        Hooks whose seeds are not used become idle: numbers are the same without them.
        """
        calls, keys = dict(self._num_calls), dict(self._keys)
        states = [generator.get_state() for generator in self._generators]
        watch = _Watch(self)
        self._num_calls.clear()
        self._latest = None
        with watch:
            run()
        made, last = dict(self._num_calls), self._latest
        self._num_calls, self._keys = calls, keys
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        for submodule in module.modules():
            hook = self._hooks.get(submodule)
            if hook is not None and not type(submodule).__module__.startswith("torch.nn."):
                hook.is_idle = hook.name_key not in watch.names
        idle = {hook.name_key for hook in self._hooks.values() if hook.is_idle}
        return Draws({n: c for n, c in made.items() if n in idle}, last if last in idle else None)

    def catch_up(self, draws: Draws) -> None:
        """Set generators and call counts as if these modules had run uncompiled."""
        if self._prefix is None:
            return
        self._num_calls = dict(Counter(self._num_calls) + Counter(draws.skipped))
        if draws.last is not None:
            self._seed(mix_on(self._prefix, draws.last, self._num_calls[draws.last] - 1))

    def _rest(self) -> None:
        """Remove hooks from modules that have no other hooks, whose order would change."""
        if not self._resting:
            for module, number, hook in self._registered:
                if list(module._forward_pre_hooks) == [number]:
                    del module._forward_pre_hooks[number]
                    self._resting.append((module, number, hook))

    def _wake(self) -> None:
        """Put the hooks back, in front of hooks that were added meanwhile."""
        self._untouched = None
        for module, number, hook in self._resting:
            hooks = module._forward_pre_hooks
            later = dict(hooks)
            hooks.clear()
            hooks.update({number: hook, **later})
        self._resting = []

    def _before_call(self, name_key: int) -> None:
        if self._prefix is None:
            return
        self._latest = name_key
        # The present seed identifies the place of this call in the forward pass.
        place = (self._generators[0].initial_seed(), name_key)
        if torch._C._current_graph_task_id() != -1 and place in self._keys:
            # Inside backward, activation checkpointing repeats a computation of forward, from the
            # saved state of the generators, and must draw the same numbers.
            self._seed(self._keys[place])
            return
        call = self._num_calls.get(name_key, 0)
        self._num_calls[name_key] = call + 1
        key = mix_on(self._prefix, name_key, call)
        self._keys[place] = key & POSITIVE
        self._seed(key)

    def _seed(self, key: int) -> None:
        for generator in self._generators:
            generator.manual_seed(key & POSITIVE)


class _Watch(TorchDispatchMode):
    """Torch mode that records the module whose seed was in use at each random draw."""

    def __init__(self, owner: KeyedRandomness) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self.names: set[int | None] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.names.add(self._owner._latest)
        return func(*args, **(kwargs or {}))


# ---- Numerics fingerprint ----
#
# The fingerprint names everything that decides the bits of a computation on this machine. Workers
# of one deterministic run must have equal digests. Call it in the thread that computes, because
# thread counts belong to the thread.

_COMPILERS: Final = ("g++", "gcc", "clang++")
"""The C++ compilers that inductor tries if CXX is not set."""


def numerics_fingerprint(device: torch.device) -> tuple[str, str]:
    """Return (digest, text) that identify the numerics of `device` and the calling thread."""
    parts = [f"torch {torch.__version__}", f"device {device_name(device)}"]
    if device.type == "cuda":
        cudnn = torch.backends.cudnn.version()
        parts += [f"CUDA {torch.version.cuda}", f"cuDNN {cudnn}"]
        parts.append(f"capability {torch.cuda.get_device_capability(device)}")
    parts += [
        f"CPU capability {torch.backends.cpu.get_cpu_capability()}",
        _blas(),
        f"threads {torch.get_num_threads()}",
        f"matmul precision {torch.get_float32_matmul_precision()}",
        _compiler(),
    ]
    description = ", ".join(parts)
    return hashlib.sha256(description.encode()).hexdigest()[:16], description


def device_name(device: torch.device) -> str:
    """Return the model name of the CPU or GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    return processor_name(cpuinfo.read_text() if cpuinfo.exists() else "") or device.type


def processor_name(cpuinfo: str) -> str:
    """Return the processor's name from the text of /proc/cpuinfo; "" if it has none.

    On x86 this is the model name, on arm64 the numbers of implementer, part and variant, which are
    all that its kernel reports. Different processors must have different names.
    """
    match_ = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    if match_:
        return match_[1]
    columns = (
        re.findall(rf"^CPU {key}\s*:\s*(\S+)$", cpuinfo, re.MULTILINE)
        for key in ("implementer", "part", "variant")
    )
    kinds = sorted({"/".join(column) for column in zip(*columns, strict=False)})
    return f"arm64 {' '.join(kinds)}" if kinds else ""


@cache
def _compiler() -> str:
    """Return the version of the C++ compiler with which models are compiled for the CPU."""
    path = find_compiler()
    if path is None:
        return "no C++ compiler"
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return f"C++ compiler {path}"
    return f"C++ {output.stdout.partition(chr(10))[0]}"


def find_compiler() -> str | None:
    """Return the C++ compiler that inductor will use; None if there is none."""
    named = os.environ.get("CXX")
    paths = (shutil.which(name) for name in ([named] if named else _COMPILERS))
    return next((path for path in paths if path), None)


def _blas() -> str:
    match_ = re.search(r"BLAS_INFO=([^,\s]+)", torch.__config__.show())
    library = match_[1] if match_ else "unknown"
    version = re.search(r"Math Kernel Library Version (\S+)", torch.__config__.show())
    return f"BLAS {library} {version[1]}" if version else f"BLAS {library}"
