"""What this process is and offers, as placement sees it.

Owns the facts about device, memory and numerics. Called in the torch thread, whose thread count
is part of the numerics.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from stratagem.v1 import types_pb2
from stratagem.worker.fingerprint import device_name, numerics_fingerprint


def capability_of(
    device: torch.device, local_data: Iterable[str], tags: Iterable[str]
) -> types_pb2.Capability:
    """The capability of the calling thread on a device."""
    fingerprint, description = numerics_fingerprint(device)
    return types_pb2.Capability(
        device=str(device),
        device_name=device_name(device),
        memory_bytes=_memory_bytes(device),
        num_threads=torch.get_num_threads(),
        numerics_fingerprint=fingerprint,
        numerics_description=description,
        local_data=sorted(local_data),
        tags=sorted(set(tags)),
    )


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
