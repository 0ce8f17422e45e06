"""The generators that the user's code draws from: seeding them, and leaving them as they were.

These are Python's, numpy's and torch's default generator on the CPU. Must not know what keys mean.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from stratagem.common.numerics.keys import POSITIVE


def seed_users_generators(key: int) -> None:
    """Seeds Python's generator and numpy's, which only the user's code draws from. key: 64 bits."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


def seed_generators(key: int) -> None:
    """Seeds all of them."""
    seed_users_generators(key)
    torch.default_generator.manual_seed(key & POSITIVE)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restores all generators at the end of the context."""
    python, numpy = random.getstate(), np.random.get_state()
    of_torch = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(of_torch)


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch compute with one thread inside the context, in the thread that enters it."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
