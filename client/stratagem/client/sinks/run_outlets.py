"""Logs a run to sinks while it is followed, and says at the end what is not written."""

from collections.abc import Callable, Iterable, Mapping
from typing import Self

from stratagem.client.sdk.run_handle import RunHandle
from stratagem.client.sdk.views import Event, Progress
from stratagem.client.sinks.contract import Sink
from stratagem.client.sinks.outlet import KINDS, Outlet
from stratagem.client.sinks.registry import sink_of


def sinks_of(texts: Iterable[str]) -> dict[str, Sink]:
    """Return the sinks that a command was given; raises InvalidInputError for one that is none."""
    return {text: sink_of(text) for text in texts}


class LogOutlets:
    """The sinks of one run; on leaving the context all is written, or said to be missing."""

    def __init__(
        self, run: RunHandle, sinks: Mapping[str, Sink], complain: Callable[[str], None]
    ) -> None:
        """sinks: by the text that names each. complain: tells the user a sentence."""
        self._run_id, self._complain = run.run_id, complain
        self._outlets = {text: Outlet(text, sink, run, complain) for text, sink in sinks.items()}
        self.problems: dict[str, str] = {}
        """By sink: why it is not written to its end."""

    def take(self, item: Event | Progress) -> Event | Progress:
        """Wake the sinks where an item brings them something; returns it."""
        if isinstance(item, Event) and item.kind in KINDS:
            for outlet in self._outlets.values():
                outlet.wake()
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for text, outlet in self._outlets.items():
            if problem := outlet.finish():
                self.problems[text] = problem
                if outlet.is_refused:  # it has said so, and completes nothing
                    continue
                completed = f'"stratagem export {self._run_id} --to {text}" completes it'
                self._complain(f"{text}: not all is written ({problem}); {completed}")
