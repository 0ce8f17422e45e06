"""Counts of the failures of a population's members, by kind, and the commonest reason.

One member that fails is the population's business: it copies another one. Many that fail alike
have a reason that is the job's, which users should not have to look for in the log.
"""

import re
from dataclasses import dataclass, replace
from typing import Final

from stratagem.coordinator.core.facts import ErrorRecord, PartyFailed

_MAX_KINDS: Final = 64
_NUMBER: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class FailureKind:
    """Failures that differ in nothing but numbers, by the first of them."""

    pattern: str
    reason: str
    error: ErrorRecord | None
    count: int
    members: frozenset[int]

    def text(self, population_size: int) -> str:
        """Return the reason, and how many members share it; with half of them it seems to be the
        job's."""
        alike = len(self.members)
        if alike == 1:
            return self.reason
        whose = "; the reason seems to be the job's" if 2 * alike >= population_size else ""
        return f"{alike} of {population_size} members failed alike: {self.reason}{whose}"


@dataclass(frozen=True, slots=True)
class Failures:
    """The failures of the members in a whole run, counted by kind."""

    num_failures: int = 0
    kinds: tuple[FailureKind, ...] = ()

    def with_one(self, member: int, failed: PartyFailed) -> "Failures":
        """Return the failures with one more; of a new kind only where there are not too many."""
        pattern, kinds = _NUMBER.sub("#", failed.reason), list(self.kinds)
        at = next((i for i, kind in enumerate(kinds) if kind.pattern == pattern), None)
        if at is not None:
            kind = kinds[at]
            kinds[at] = replace(kind, count=kind.count + 1, members=kind.members | {member})
        elif len(kinds) < _MAX_KINDS:
            kinds.append(FailureKind(pattern, failed.reason, failed.error, 1, frozenset({member})))
        return Failures(self.num_failures + 1, tuple(kinds))

    def commonest(self) -> FailureKind | None:
        """Return the most frequent kind; the first of equals."""
        return max(self.kinds, key=lambda kind: kind.count, default=None)

    def text(self, population_size: int) -> str:
        """Return the number of failures and their commonest reason, for people; "" when there are
        none."""
        kind = self.commonest()
        if kind is None:
            return ""
        often = "1 failure" if self.num_failures == 1 else f"{self.num_failures} failures"
        return f"{often} of members, most often {kind.text(population_size)}"
