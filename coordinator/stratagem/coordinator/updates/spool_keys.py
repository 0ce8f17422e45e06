"""Identifies updates, and names the folder below the spool in which each is stored:

    <run>.<submission>/<party>/<round>      where the party is root, root-<returns>, root.<path>, ..

A run's folder is that of one submission of it, and a party's that of the time since the run last
went back to an earlier commit. So no run or round finds an update that was not made for it, whether
or not what is over has been deleted. Knows nothing of what the folders contain.
"""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, Self

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Party, RunId, check_run_id
from stratagem.coordinator.core.state import EndedRun, RunRecord

_SEGMENT: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ROOT: Final = re.compile(r"root(?:-(\d{1,9}))?(?:\..*)?")


@dataclass(frozen=True, slots=True)
class SpoolRun:
    """One submission of a run, since its last return to an earlier commit; updates belong to
    one."""

    run_id: RunId
    submission: str = ""
    """See RunSubmitted."""
    num_returns: int = 0
    """How often the run has gone back to an earlier commit: its rounds are repeated then, perhaps
    from other states, and what was accepted for them before does not count."""

    @classmethod
    def of(cls, run: RunRecord | EndedRun) -> Self:
        """Return the present submission and returns of a run."""
        num_returns = run.num_returns if isinstance(run, RunRecord) else 0
        return cls(run.run_id, run.submission, num_returns)

    @property
    def folder(self) -> str:
        """Return the run's folder, with all parties and returns. Raises InvalidInputError for what
        is no name."""
        name = check_run_id(self.run_id)
        if not self.submission:
            return name
        if not _SEGMENT.fullmatch(self.submission):
            raise InvalidInputError.at("submission", f"{self.submission!r} is no name")
        return f"{name}.{self.submission}"

    def folder_of(self, party: Party, round_num: int) -> PurePosixPath:
        """Return the folder of a round. Raises InvalidInputError for what is no name."""
        segments = party.split("/") if party else []
        if not all(_SEGMENT.fullmatch(segment) for segment in segments):
            raise InvalidInputError.at("party", f"{party!r} is no path of names")
        root = f"root-{self.num_returns}" if self.num_returns else "root"
        return PurePosixPath(self.folder, ".".join((root, *segments)), str(int(round_num)))

    def is_over(self, party_folder: str) -> bool:
        """Return True if the contents of a party's folder were accepted before the run last went
        back."""
        match_ = _ROOT.fullmatch(party_folder)
        return match_ is not None and int(match_[1] or 0) < self.num_returns


@dataclass(frozen=True, slots=True)
class SpoolKey:
    """The identity of a client's update in a round."""

    run: SpoolRun
    party: Party
    round_num: int
    client: int

    @property
    def folder(self) -> PurePosixPath:
        """Return the folder of its round."""
        return self.run.folder_of(self.party, self.round_num)
