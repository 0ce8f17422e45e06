"""The Triton programs on what this machine has: its GPU, or triton's interpreter on the CPU.

The interpreter runs each program's own code over numpy arrays, so the programs are tested where
there is no GPU; whether they compile is asked by `test_compile`.
"""

import pytest
import torch

from stratagem.worker.kernels.ops import Backend

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def fused(device: torch.device) -> Backend:
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")  # read when the programs are defined
        from stratagem.worker.kernels import triton as fused

        return fused
