"""Who takes part in a federation: an open roster, and what becomes of clients that keep failing."""

from collections.abc import Iterator
from typing import Final

from stratagem.common.base.errors import Violation
from stratagem.common.schema.document import DocumentValue
from stratagem.common.schema.field_types import Positive, SharedCount
from stratagem.common.schema.rules import rule

DEFAULT_WAIT_S: Final = 86_400.0
"""A day: a site that is closed over night is back by then."""


class Roster(DocumentValue, is_extras=True):
    """Who is a client, and how long the federation waits for clients.

    open: clients join, leave and come back while the run goes on, num_clients at most; otherwise
    there are exactly num_clients from the start. min_clients: how many must be able to take part
    for a round to open. wait_s: for how many seconds a round waits for so many, after which the run
    fails, and for a client that is lost in it, after which the round goes on without it.
    """

    open: bool = False
    min_clients: SharedCount = 1
    wait_s: Positive = DEFAULT_WAIT_S

    @rule
    def _of_an_open_one(self) -> Iterator[Violation]:
        if self.open:
            return
        text = "belongs to an open roster (open: true); any other has exactly num_clients"
        if self.min_clients != 1:
            yield Violation("min_clients", text)
        if self.wait_s != DEFAULT_WAIT_S:
            yield Violation("wait_s", text)


class Strikes(DocumentValue, is_extras=True):
    """When a client that keeps failing is left alone for some rounds.

    limit: rounds in a row in which it is rejected by its own fault. bench_rounds: rounds that it
    then does not take part in.
    """

    limit: SharedCount
    bench_rounds: SharedCount = 5
