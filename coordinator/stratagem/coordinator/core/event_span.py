"""A span of the events of one run, as a reader asks for it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class EventSpan:
    """The events from one index up to another, of some kinds, in one order or the other."""

    from_index: int = 0
    before_index: int | None = None
    """None: up to the newest."""
    kinds: frozenset[str] = frozenset()
    """Names of facts; empty: all of them."""
    newest_first: bool = False

    def after(self, index: int) -> "EventSpan":
        """Return what is left once this event was read."""
        if self.newest_first:
            return replace(self, before_index=index)
        return replace(self, from_index=index + 1)

    def wants(self, kind: str) -> bool:
        """Return True for a kind of event that is in the span."""
        return not self.kinds or kind in self.kinds
