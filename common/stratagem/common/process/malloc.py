"""Tuning of glibc's allocator for processes that move tensors.

By default every chunk is mapped, faulted in and given back once per copy, and these page
faults bound the speed of a Python gRPC stream: with the four values below it is 2 to 4 times as
fast (benchmarks/tensor_stream.py). Only all four together help. Must be called before
the first big allocation, so at the start of a process, and knows nothing of the rest.
"""

import ctypes
import os
from typing import Final

SWITCH: Final = "STRATAGEM_MALLOC"

_VALUES: Final = (
    ("M_MMAP_THRESHOLD", -3, 32 * 2**20),
    ("M_TRIM_THRESHOLD", -1, 256 * 2**20),
    ("M_TOP_PAD", -2, 64 * 2**20),
    ("M_ARENA_MAX", -8, 1),  # what one thread has freed, another can use: each arena keeps its own
)


_said = "malloc: never tuned in this process"


def said() -> str:
    """Return the sentence that says what `tune_malloc` has done in this process."""
    return _said


def tune_malloc() -> str:
    """Set the four values, unless the operator has an opinion; says for the log what was done."""
    global _said
    _said = _tuned()
    return _said


def give_back() -> None:
    """Give the system what is free, in holes too; it takes milliseconds, and later page faults.

    Nothing where this C library cannot.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _tuned() -> str:
    if os.environ.get(SWITCH, "").lower() == "off":
        return f"malloc: left alone, {SWITCH}=off"
    own = sorted(name for name in os.environ if name.startswith("MALLOC_") or name == "LD_PRELOAD")
    if own:
        return f"malloc: left alone, {', '.join(own)} set by the operator"
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return "malloc: left alone, this C library has no mallopt"
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    refused = [name for name, parameter, value in _VALUES if mallopt(parameter, value) != 1]
    if refused:
        return f"malloc: {', '.join(refused)} refused by the C library"
    return "malloc: tuned for chunks of a tensor stream"
