"""Verify segments by executing them again: choose the segments, and conclude who is wrong.

A segment is a pure function of its job, base state and numerics, so two executions that end with
different states have at least one that is wrong. A third execution decides by majority.
"""

import hashlib
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from stratagem.common.base.ids import Digest, Party

VERIFIER: Final = Party("verifier")
"""The party of a run that executes segments again while the run trains; see the job section
`verification`."""


class Conclusion(StrEnum):
    """The conclusion about who is wrong, as far as a verification can tell."""

    EQUAL = "EQUAL"
    """All states that were computed again equal those of the run."""
    RUN = "RUN"
    """The run is wrong: two other executions agree with each other, and not with the run."""
    VERIFIER = "VERIFIER"
    """The second execution is wrong: a third one agrees with the run."""
    JOB = "JOB"
    """Three executions have three results: the job does not determine its bits."""
    NOTHING = "NOTHING"
    """No state of the run could be computed again."""
    OPEN = "OPEN"
    """The second execution differs from the run, and there is no third one that could decide."""


def conclude(run: str, second: str, third: str | None) -> Conclusion:
    """Return who is wrong, from the digests of the run and of two executions that are independent
    of each other; third: None if there is no third execution."""
    if run == second:
        return Conclusion.EQUAL
    if third is None:
        return Conclusion.OPEN
    if third == second:
        return Conclusion.RUN
    return Conclusion.VERIFIER if third == run else Conclusion.JOB


def joint_digest(parts: Iterable[str]) -> Digest:
    """Return a digest of several states and settings, which belong together."""
    return Digest(hashlib.sha256("\n".join(parts).encode()).hexdigest())


def share_of(seed: int, segment: int) -> float:
    """Return a number from 0 to below 1 for a segment, the same each time; a sample of a run's
    segments contains those whose number is below the sample's share."""
    digest = hashlib.sha256(f"{seed}/{segment}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2.0**56
