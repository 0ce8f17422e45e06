"""The checks, by name, with what each one shows; and what a check says."""

from dataclasses import dataclass
from enum import Enum
from typing import Final


class SkippedError(Exception):
    """Raised by a check that cannot run here; its message is the reason."""


class CheckStatus(Enum):
    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check came to."""

    name: str
    status: CheckStatus
    seconds: float
    said: str
    """A figure; of one that failed or was skipped the reason."""


CHECKS: Final = {
    "versions": ("machine", "what is installed computes on the device"),
    "copies": ("machine", "copies through page-locked memory have the same bytes"),
    "by_uuid": ("machine", "a device that is named by its UUID, as a MIG slice is, is found"),
    "kernels": ("programs", "Triton's programs have the bits of the reference"),
    "marked": ("programs", "the tests that need a CUDA device pass"),
    "pieces": ("programs", "an optimizer over pieces of parameters has the bits of the whole"),
    "precisions": ("steps", "each precision computes the same bits twice"),
    "compiled": ("steps", "a compiled model computes the same bits twice"),
    "snapshots": ("steps", "a snapshot stays as it is while training goes on from it"),
    "estimate": (
        "steps",
        "the estimate of memory is within 10 % of a measured step (15 % on a CPU)",
    ),
    "groups": ("exchanges", "a group that is cut is formed anew, 20 times, with the same sums"),
    "killed_member": ("exchanges", "survivors of a member that was killed do the step again"),
    "frozen_member": ("exchanges", "a member that stands still is given up at the deadline"),
    "bandwidth": (
        "exchanges",
        "the exchange beside the engine's own all-reduce: 0.7 or more of it",
    ),
    "shared_device": ("runs", "two workers on one device have the bits of one process"),
    "pipeline": ("runs", "two stages of a pipeline have the bits of one"),
    "out_of_memory": ("runs", "a job too large for the device says so, and the next one runs"),
    "lost_device": (
        "runs",
        "an assertion on the device costs its worker's process and no other job",
    ),
}
"""name -> (module, what it shows), in the order in which they run."""


def table_of(results: list[CheckResult]) -> str:
    """Return the results as a table in Markdown."""
    lines = ["| check | | s | |", "|---|---|---:|---|"]
    for result in results:
        shows = CHECKS[result.name][1]
        said = result.said.replace("|", "/").replace("\n", " ")
        seconds = f"{result.seconds:.1f}"
        lines.append(f"| {shows} (`{result.name}`) | {result.status.value} | {seconds} | {said} |")
    return "\n".join(lines)
