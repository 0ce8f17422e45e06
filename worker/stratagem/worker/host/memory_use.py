"""The memory that this process uses now."""

import resource
import sys
from pathlib import Path
from typing import Final

import torch

_STATM: Final = Path("/proc/self/statm")
_RSS: Final = 1
"""Which of its numbers counts resident pages."""


def memory_bytes(device: torch.device) -> int:
    """Return the bytes of tensors on a GPU; elsewhere what of this process is in memory, where the
    system does not tell, the most it ever was."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(_STATM.read_text().split()[_RSS]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
