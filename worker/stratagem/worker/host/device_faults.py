"""Faults after which a CUDA device computes nothing more for this process.

An assertion that fails in a kernel, or a failing device, leaves the process a context in which
every later call fails. So the process has to be replaced. Errors by which only the present call
fails, such as a lack of memory, are none of these. Whose fault it is follows from the driver's
words: an assertion fails because of the job's own numbers, and would fail on any device.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch

from stratagem.common.base.errors import UserCodeError, led_to

_OF_THE_JOB: Final = ("device-side assert triggered",)
_OF_THE_DEVICE: Final = (
    "illegal memory access",
    "misaligned address",
    "illegal instruction",
    "invalid program counter",
    "hardware stack error",
    "uncorrectable",
    "contained",
    "unspecified launch failure",
    "launch timed out",
    "unknown error",
)
"""What the driver says of errors that stay (CUDA Runtime API, cudaError_t): those that leave "the
process in an inconsistent state"."""
HINT: Final = (
    "An index was outside of its table, such as a label that is not below the number of classes; "
    "on a CPU, or with CUDA_LAUNCH_BLOCKING=1, the error names the line."
)


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """Why the device is lost to this process."""

    reason: str
    """The driver's words."""
    is_the_jobs: bool
    """True where the job would bring it about anywhere."""


def device_fault(error: BaseException) -> DeviceFault | None:
    """Return the fault that this error, or one that it was raised from, tells of, if any."""
    for behind in led_to(error):
        if isinstance(behind, torch.AcceleratorError):
            reason = str(behind).partition("\n")[0]
            for signs, is_the_jobs in ((_OF_THE_JOB, True), (_OF_THE_DEVICE, False)):
                if any(sign in reason for sign in signs):
                    return DeviceFault(reason, is_the_jobs)
    return None


def told_fault(error: BaseException, fault: DeviceFault, activity: str) -> UserCodeError:
    """Return the error for a job whose own numbers have brought the fault about. The call that
    raised it need not be the one that failed: a device is ahead of its host."""
    trace = error.traceback if isinstance(error, UserCodeError) else ""
    named = f"{fault.reason}. {HINT}"
    return UserCodeError("torch.AcceleratorError", named, trace, activity=activity)


@dataclass(slots=True)
class DeviceHealth:
    """Whether this process still has its device. Written in the torch thread."""

    fault: DeviceFault | None = None
    on_lost: Callable[[DeviceFault], None] = field(default=lambda _: None)
    """Called once, in the torch thread."""

    def lose(self, fault: DeviceFault) -> None:
        """Take in that the device is lost; later faults are consequences of the first."""
        if self.fault is None:
            self.fault = fault
            self.on_lost(fault)
