"""Remembers which exceptions of a federated round were journaled: each is journaled once.

Whole tracebacks of thousands of clients that fail alike would fill the journal.
"""

from dataclasses import dataclass, field
from typing import Final

from stratagem.common.base.ids import Party, RunId
from stratagem.coordinator.core.effects import TrainClient
from stratagem.coordinator.core.facts import ErrorRecord

MAX_ERRORS: Final = 8
"""Different exceptions of a round that are journaled."""


@dataclass(slots=True)
class Told:
    """The journaled exceptions of the newest round of each party; lost with this process, which
    then journals them again."""

    _rounds: dict[tuple[RunId, Party], tuple[int, set[tuple[str, str]]]] = field(
        default_factory=dict
    )

    def is_news(self, effect: TrainClient, error: ErrorRecord) -> bool:
        """Return True if the error is to be journaled; it counts as journaled then."""
        number, known = self._rounds.get((effect.run_id, effect.party), (0, set()))
        if number != effect.round_num:
            known = set()
        self._rounds[effect.run_id, effect.party] = effect.round_num, known
        key = (error.type, error.message)
        if key in known or len(known) == MAX_ERRORS:
            return False
        known.add(key)
        return True

    def forget(self, run_id: RunId) -> None:
        """Forget the exceptions of a run that has ended."""
        for key in [key for key in self._rounds if key[0] == run_id]:
            del self._rounds[key]
