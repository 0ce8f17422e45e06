"""Reads the facts of a run whose clients are drawn in secret, by the numbers that readers get."""

from dataclasses import replace
from typing import Final

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.event_span import EventSpan
from stratagem.coordinator.core.secret_draws import SHOWN
from stratagem.coordinator.store.journal.fact_codec import Committed
from stratagem.coordinator.store.journal.fact_log import Recorded

PAGE_FACTS: Final = 256


async def shown_facts(
    recorded: Recorded, run_id: RunId, span: EventSpan, num_facts: int
) -> list[Committed]:
    """Return the first facts of a span of such a run, so many at most. span: in the numbers that
    readers get. A run has some four such facts a round, so all before the span are read."""
    found: list[Committed] = []
    left, number = EventSpan(kinds=SHOWN), 0
    while page := await recorded.read(run_id, left, PAGE_FACTS):
        for item in page:
            if number == span.before_index or (len(found) == num_facts and not span.newest_first):
                return found[::-1][:num_facts] if span.newest_first else found
            if number >= span.from_index and span.wants(type(item.entry.fact).__name__):
                found.append(replace(item, shown_index=number))
            number += 1
        left = left.after(page[-1].index)
    return found[::-1][:num_facts] if span.newest_first else found
