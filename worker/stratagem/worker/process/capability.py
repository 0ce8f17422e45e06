"""The capability of this process by which the coordinator places work on it.

Owns the facts about device, memory and numerics. Called in the torch thread, whose thread count
is part of the numerics.
"""

import os
import re
from collections.abc import Iterable

import torch

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.numerics import rules
from stratagem.v1 import types_pb2
from stratagem.worker.engine.numerics.fingerprint import device_name, numerics_fingerprint


def device_of(name: str) -> torch.device:
    """Return the device of that name. Raise InvalidInputError where this process has none."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise InvalidInputError.at("--device", f"{name!r} is not cpu or cuda:N")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.backends.cuda.is_built():
        lack = f"torch {torch.__version__} is built without CUDA; install one with it"
        raise InvalidInputError.at("--device", f"{name}: {lack}, or use --device cpu")
    num_devices = torch.cuda.device_count()
    if (device.index or 0) >= num_devices:
        there = ", ".join(f"cuda:{number}" for number in range(num_devices)) or "none"
        raise InvalidInputError.at(
            "--device", f"{name} is not there; CUDA devices of this machine: {there}"
        )
    return device


def capability_of(
    device: torch.device, local_data: Iterable[str], tags: Iterable[str]
) -> types_pb2.Capability:
    """Return the capability of the calling thread on a device."""
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
        numerics_rules=rules.CURRENT,
    )


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
