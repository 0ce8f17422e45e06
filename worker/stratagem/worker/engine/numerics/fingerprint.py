"""Names everything that decides the bits of a computation on this machine.

Workers of one deterministic run must have equal digests. Call it in the thread that computes,
because thread counts belong to the thread. Must not know runs or jobs.
"""

import hashlib
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

import torch

_COMPILERS: Final = ("g++", "gcc", "clang++")
"""What inductor looks for where CXX is not set."""


def numerics_fingerprint(device: torch.device) -> tuple[str, str]:
    """Returns (digest, the same in words) for computations on `device` in the calling thread."""
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
    """Returns the model name of the processor or the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    return processor_name(cpuinfo.read_text() if cpuinfo.exists() else "") or device.type


def processor_name(cpuinfo: str) -> str:
    """Returns the processor's name from the text of /proc/cpuinfo; "" where it has none.

    For x86 this is the model name; for arm64 it is the numbers of implementer, part and variant,
    which are all that its kernel reports. Two kinds of processor under one name would be taken for
    equals, which they are not.
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
    """Returns the version of the C++ compiler that compiles models (execution.mode) for the CPU."""
    path = find_compiler()
    if path is None:
        return "no C++ compiler"
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return f"C++ compiler {path}"
    return f"C++ {told.stdout.partition(chr(10))[0]}"


def find_compiler() -> str | None:
    """The C++ compiler that inductor will use; None without one."""
    named = os.environ.get("CXX")
    paths = (shutil.which(name) for name in ([named] if named else _COMPILERS))
    return next((path for path in paths if path), None)


def _blas() -> str:
    match_ = re.search(r"BLAS_INFO=([^,\s]+)", torch.__config__.show())
    library = match_[1] if match_ else "unknown"
    version = re.search(r"Math Kernel Library Version (\S+)", torch.__config__.show())
    return f"BLAS {library} {version[1]}" if version else f"BLAS {library}"
