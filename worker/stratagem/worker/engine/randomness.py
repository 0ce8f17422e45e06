"""Random numbers that depend on what is computed, not on who computes it or what came before.

Before every module that may draw random numbers the default generator is seeded with a key of
(seed, step, shard, micro-batch; module name; number of the call). So a dropout mask is the same
whichever worker computes the shard. Knows modules, but neither data nor the exchange.
"""

from __future__ import annotations

import hashlib
import random
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_POSITIVE: Final = (1 << 63) - 1


def mix(*values: int | str) -> int:
    """64 well-mixed bits of the values and their order (splitmix64 steps)."""
    state = 0
    for value in values:
        number = _number(value) if isinstance(value, str) else value
        state = (state + (number & _MASK) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def draws_random_numbers(module: nn.Module) -> bool:
    """True for torch's stochastic modules, and for every class that is not torch's own."""
    kind = type(module)
    if not kind.__module__.startswith("torch.nn."):
        return True
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(
        module,
        nn.modules.dropout._DropoutNd | nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d,
    )


class KeyedRandomness:
    """Seeds the generators of one model's device; hooks stay on the model for its life."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._prefix: int | None = None
        self._num_calls: dict[int, int] = {}
        self._keys: dict[tuple[int, int], int] = {}
        for name, module in model.named_modules():
            if draws_random_numbers(module):
                module.register_forward_pre_hook(partial(self._before_call, _number(name)))

    def begin(self, *key: int | str, forget: bool = True) -> None:
        """Starts the computation named by `key`: a shard of a step, a batch of an evaluation.

        forget=False where the backward of an earlier computation is still to come.
        """
        self._prefix = mix(*key)
        self._num_calls.clear()
        if forget:
            self._keys.clear()
        self._seed(self._prefix)
        # Augmentation in the user's data set may use these two.
        random.seed(self._prefix)
        np.random.seed(self._prefix & 0xFFFFFFFF)

    def end(self) -> None:
        """Calls from now on draw as they would without us."""
        self._prefix = None

    def _before_call(self, name_key: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._prefix is None:
            return
        # The seed in force tells at which place of the forward pass this call stands.
        place = (self._generators[0].initial_seed(), name_key)
        if torch._C._current_graph_task_id() != -1 and place in self._keys:
            # Inside backward: activation checkpointing computes again what forward computed, from
            # the generator state it saved there, and must draw the same numbers.
            self._seed(self._keys[place])
            return
        call = self._num_calls.get(name_key, 0)
        self._num_calls[name_key] = call + 1
        key = mix(self._prefix, name_key, call)
        self._keys[place] = key & _POSITIVE
        self._seed(key)

    def _seed(self, key: int) -> None:
        for generator in self._generators:
            generator.manual_seed(key & _POSITIVE)
