"""How many steps one row stands for: a power of two, so two rows make one of the next stride."""

from typing import Final

MAX_ROWS: Final = 2048
"""Rows of a series over all steps of a run."""


def stride_of(num_steps: int) -> int:
    """Return the smallest power of two with which so many steps take at most MAX_ROWS rows."""
    stride = 1
    while -(-num_steps // stride) > MAX_ROWS:
        stride *= 2
    return stride
