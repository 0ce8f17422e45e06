"""Which exceptions of a federated round stand in the journal already: they stand there once.

Whole tracebacks of thousands of clients that fail alike would fill it.
"""

from dataclasses import dataclass, field
from typing import Final

from stratagem.common.base.ids import Party, RunId
from stratagem.coordinator.core.effects import TrainClient
from stratagem.coordinator.core.facts import ErrorRecord

MAX_ERRORS: Final = 8
"""Different ones of a round that are journaled."""


@dataclass(slots=True)
class Told:
    """Of the newest round of each party; forgotten with this process, and told again then."""

    _rounds: dict[tuple[RunId, Party], tuple[int, set[tuple[str, str]]]] = field(
        default_factory=dict
    )

    def is_news(self, effect: TrainClient, error: ErrorRecord) -> bool:
        """Whether the error is to be journaled; it counts as told then."""
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
        """The run has ended."""
        for key in [key for key in self._rounds if key[0] == run_id]:
            del self._rounds[key]
