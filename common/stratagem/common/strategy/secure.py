"""The section `options.secure_aggregation`: a federation sums updates that nobody sees.

The module defines the section's fields and the options of a strategy that exclude it; the masks are
made in `common/privacy`.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, PlainValidator

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.privacy.sharing import AUTO, MIN_CLIENTS
from stratagem.common.schema.document import DocumentValue, Positive
from stratagem.common.schema.rules import differing, rule

if TYPE_CHECKING:
    from stratagem.common.privacy.quantisation import Quantisation

MAX_SECURE_CLIENTS: Final = 10_000
MAX_DEGREE: Final = 1024
"""The most neighbours of a client, as each costs it a key agreement, a mask and two shares."""
MAX_ROWS: Final = 1 << 31
_BESIDE: Final = frozenset(
    {
        "local_epochs",
        "quorum",
        "round_deadline_s",
        "server_learning_rate",
        "server_optimizer",
        "on_client_error",
        "roster",
        "strikes",
        "secure_aggregation",
    }
)
"""The options that may be combined with secure aggregation: they see only means, or no updates."""
_WHY: Final = {
    "on_missing_quorum": "who has failed has no keys of the round, and cannot come back into it",
    "robust": "it compares single updates, and nobody sees one",
    "over_select": "who is fast would decide whose secrets are opened",
    "late_updates": "an update is masked for one round, and its masks are in no other",
    "inner": "a silo is several workers, and its update would be seen where they are added up",
}


def _check_degree(value: object) -> int | str:
    if value == AUTO:
        return AUTO
    if type(value) is int and 2 <= value <= MAX_DEGREE:
        return value
    raise InvalidInputError(f"{value!r} is not {AUTO} or a number from 2 to {MAX_DEGREE}")


class SecureAggregation(DocumentValue, is_extras=True):
    """The coordinator learns the sum of a round's updates, but no single update
    (https://eprint.iacr.org/2017/281).

    threshold: more than this fraction of the holders of a client's secrets are needed to open them;
    a round with fewer survivors fails. clip: the largest change of a model's element in a round, in
    either direction; larger changes are clipped. bits: the size of a change as an integer. weights:
    "uniform" counts each client as one, "rows" by its number of rows, which nobody learns.
    max_rows: with "rows", the largest weight of a client. degree: the number of other clients with
    which each client shares masks and secrets; "auto": all of them up to 64 clients, else 100.
    """

    threshold: Annotated[float, Field(ge=0.5, lt=1)] = 0.67
    clip: Positive = 8.0
    bits: Annotated[int, Field(ge=2, le=32)] = 20
    weights: Literal["uniform", "rows"] = "uniform"
    max_rows: Annotated[int, Field(ge=1, le=MAX_ROWS)] | None = None
    degree: Annotated[int | str, PlainValidator(_check_degree)] = AUTO

    @rule
    def _weights(self) -> Iterator[Violation]:
        if self.weights == "rows" and self.max_rows is None:
            text = 'missing; with weights "rows" it says how much one client may count, for '
            yield Violation("max_rows", f"{text}example max_rows: 1000")
        if self.weights == "uniform" and self.max_rows is not None:
            yield Violation("max_rows", 'has a meaning only with weights "rows"')

    @property
    def max_weight(self) -> int:
        """Return the largest weight that a client can have in the sum."""
        return self.max_rows or 1

    def weight(self, num_rows: int) -> int:
        """Return the weight in the sum of a client with this many rows."""
        return 1 if self.max_rows is None else min(num_rows, self.max_rows)

    def quantisation(self, num_clients: int) -> "Quantisation":
        """Return the quantisation rule of a round with this many clients."""
        from stratagem.common.privacy.quantisation import Quantisation

        return Quantisation(self.clip, self.bits, num_clients, self.max_weight)


def against_secure_aggregation(options: Any) -> Iterator[Violation]:
    """Yield an error for each option that cannot be combined with secure aggregation."""
    others = [option.name for option in fields(options) if option.name not in _BESIDE]
    for name in differing(options, type(options)(), others):
        why = _WHY.get(name, "it is not defined for updates that nobody sees")
        text = f"is not possible with secure_aggregation: {why}"
        yield Violation(f"options.{name}", text)
    if options.open_roster is not None:
        text = "is not possible with secure_aggregation: a round's clients are those whose keys "
        yield Violation("options.roster.open", f"{text}were posted, and others come and go")


def wrong_numbers(
    spec: SecureAggregation, num_clients: int, num_selected: int
) -> Iterator[Violation]:
    """Yield an error if a round has too few clients for secure aggregation to hide anyone, or the
    federation has too many for its arithmetic."""
    where = "options.secure_aggregation"
    if num_selected < MIN_CLIENTS:
        text = f"a round has {num_selected} clients, and fewer than {MIN_CLIENTS} hide nobody"
        yield Violation(where, text)
    if num_clients > MAX_SECURE_CLIENTS:
        yield Violation(where, f"{num_clients} clients are more than {MAX_SECURE_CLIENTS}")
        return
    try:
        spec.quantisation(num_clients)
    except InvalidInputError as error:
        yield Violation(f"{where}.bits", str(error))
