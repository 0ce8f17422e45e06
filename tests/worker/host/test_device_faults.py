"""Which errors of torch leave a process without its device, and whose fault they are."""

import pytest
import torch

from stratagem.common.base.errors import UserCodeError
from stratagem.worker.host.exit_record import DeviceFault, DeviceHealth, device_fault, told_fault

ASSERTION = "CUDA error: device-side assert triggered"
pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("reason", "is_the_jobs"),
    [
        (ASSERTION, True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: uncorrectable ECC error encountered", False),
        ("CUDA error: unspecified launch failure", False),
    ],
)
def test_a_fault_that_stays_is_found_in_what_raised_it(reason: str, is_the_jobs: bool) -> None:
    raised = torch.AcceleratorError(f"{reason}\nSearch for it in the documentation.")
    assert device_fault(raised) == DeviceFault(reason, is_the_jobs)
    wrapped = UserCodeError("RuntimeError", "of the user's")
    wrapped.__cause__ = raised
    assert device_fault(wrapped) == DeviceFault(reason, is_the_jobs)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(ASSERTION),  # the words of somebody else
        torch.AcceleratorError("CUDA error: invalid configuration argument"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        KeyError("no such layer"),
    ],
    ids=str,
)
def test_other_errors_leave_the_device(error: Exception) -> None:
    assert device_fault(error) is None


def test_the_jobs_fault_is_told_with_what_to_do() -> None:
    fault = DeviceFault(ASSERTION, is_the_jobs=True)
    told = told_fault(torch.AcceleratorError(ASSERTION), fault, "training step 3")
    assert (told.type, told.activity) == ("torch.AcceleratorError", "training step 3")
    assert told.message.startswith(f"{ASSERTION}. An index was outside")
    behind = UserCodeError("torch.AcceleratorError", ASSERTION, "its traceback")
    assert told_fault(behind, fault, "").traceback == "its traceback"


def test_what_follows_a_fault_is_none() -> None:
    seen: list[DeviceFault] = []
    health = DeviceHealth(on_lost=seen.append)
    first, second = DeviceFault("an assertion", True), DeviceFault("what follows", False)
    health.lose(first)
    health.lose(second)
    assert (health.fault, seen) == (first, [first])
