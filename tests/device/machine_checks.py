"""Checks of the machine itself: what is installed, how fast copies are, how devices are named."""

import os
import subprocess
import sys
import time

import torch

from stratagem.worker.mesh.staging import to_host
from stratagem.worker.numerics.randomness import device_name
from tests.device.check_table import SkippedError

COPIED_BYTES = 1 << 28


def versions(device: torch.device) -> str:
    """One product of matrices on the device, against the host's in float64."""
    a, b = torch.randn(257, 129), torch.randn(129, 65)
    found = (a.to(device) @ b.to(device)).cpu()
    torch.testing.assert_close(found, (a.double() @ b.double()).float(), rtol=1e-2, atol=1e-2)
    told = [f"torch {torch.__version__}", device_name(device)]
    if device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        told += [f"CUDA {torch.version.cuda}", f"nccl {nccl}", f"{memory:.0f} GiB"]
    return ", ".join(told)


def copies(device: torch.device) -> str:
    """From the device to the host as an exchange copies, and as a plain copy does."""
    if device.type == "cpu":
        raise SkippedError("tensors of a CPU are on the host")
    there = torch.randn(COPIED_BYTES // 4, device=device)
    to_host(there).wait()  # takes the page-locked memory
    torch.cuda.synchronize(device)
    begun_s = time.perf_counter()
    staged = to_host(there).wait()
    staged_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    plain = there.cpu()
    plain_s = time.perf_counter() - begun_s
    assert staged.is_pinned()
    assert torch.equal(staged, plain)
    return f"{COPIED_BYTES / staged_s / 1e9:.1f} GB/s, pageable {COPIED_BYTES / plain_s / 1e9:.1f}"


def by_uuid(device: torch.device) -> str:
    """A process that is shown one device by its UUID has it as cuda:0."""
    if device.type == "cpu":
        raise SkippedError("a CPU has no UUID")
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    slices = [word.strip("()") for word in listed.split() if word.startswith("MIG-")]
    shown = slices[0] if slices else uuid
    program = (
        "from stratagem.worker.process.host import capability_of, device_of\n"
        "print(capability_of(device_of('cuda:0'), [], []).device_name)"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": shown}
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    return f"{shown}: {told.stdout.strip()}"
