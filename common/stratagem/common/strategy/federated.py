"""This module defines the sections of the `options` of the Federated strategy: the behaviour of a
round beyond the JSON form shared with the Rust programs.

A new option is one line of `FederatedOptions`, and a section is a class here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, assert_never

from pydantic import BeforeValidator, Field, PlainValidator

from stratagem.common.base import ids
from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.document import (
    MAX_UNSIGNED,
    DocumentValue,
    Positive,
    SharedCount,
)
from stratagem.common.schema.json import JSON
from stratagem.common.schema.rules import rule
from stratagem.common.strategy.choices import (
    Discount,
)

# ---- Membership ----
#
# An open roster determines who takes part in a federation, and strikes determine what becomes of
# clients that keep failing.

DEFAULT_WAIT_S: Final = 86_400.0
"""The default wait for clients: a day, so that sites that are closed overnight can come back."""


class Roster(DocumentValue, is_extras=True):
    """Settings of the set of clients of a federation, and of how long it waits for them.

    open: clients may join, leave and come back during the run, up to num_clients; otherwise there
    are exactly num_clients from the start. min_clients: the number of available clients without
    which no round opens. wait_s: the seconds for which a round waits for that many clients, after
    which the run fails, and for a client that is lost during the round, after which the round
    continues without it.
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
    """Settings of the exclusion (benching) of clients that fail repeatedly.

    limit: the number of consecutive rounds in which a client's update is rejected through its own
    fault before it is benched. bench_rounds: the number of rounds in which it then takes no part.
    """

    limit: SharedCount
    bench_rounds: SharedCount = 5


# ---- Ditto ----
#
# The section `options.ditto` trains a model of each client's own beside the global one.

KEY: Final = "lambda"
"""The name of Ditto's `lambda` field in documents, which is a keyword in Python."""


class Ditto(DocumentValue, is_extras=True):
    """Each client also trains a personal model, whose loss has the additional term (lambda / 2)·‖v
    − w‖² for its distance from the global model (Li et al., 2021,
    https://arxiv.org/abs/2012.04221)."""

    lambda_: Positive

    @classmethod
    def _read(cls, value: object, read: Callable[[object], Self]) -> Self:
        if isinstance(value, Mapping):
            if value.keys() != {KEY}:
                text = f"must be {{{KEY}: a number > 0}}; is {dict(value)!r}"
                raise InvalidInputError(text)
            value = {f"{KEY}_": value[KEY]}
        try:
            return super()._read(value, read)
        except InvalidInputError as error:
            fixed = [replace(item, field=item.field.removesuffix("_")) for item in error.violations]
            raise InvalidInputError(violations=fixed) from None

    @classmethod
    def _write(cls, made: Any, write: Callable[[Any], dict[str, JSON]]) -> dict[str, JSON]:
        return {
            name.removesuffix("_"): plain for name, plain in super()._write(made, write).items()
        }


# ---- Robust rules ----
#
# The section `options.robust` selects a rule that a minority of false updates cannot control.
# Every update counts as one, whatever number of rows its client claims. This section also says
# how many updates each rule needs.

MAX_ROBUST_UPDATES: Final = 1024
"""The largest number of updates for a robust rule, which compares all pairs or sorts elements."""

_FEWEST_FOR_A_MIDDLE: Final = 3
_ByzantineCount: TypeAlias = Annotated[int, Field(ge=0, le=MAX_ROBUST_UPDATES)]


class Median(DocumentValue, tag="name", name="median", is_extras=True):
    """The median of each element (https://arxiv.org/abs/1803.01498)."""


class TrimmedMean(DocumentValue, tag="name", name="trimmed_mean", is_extras=True):
    """The mean of each element without this share of values at each end
    (https://arxiv.org/abs/1803.01498)."""

    trim: Annotated[float, Field(gt=0, lt=0.5)]

    def num_trimmed(self, num_updates: int) -> int:
        """Return how many of num_updates values are left out at each end, rounded down."""
        return int(Decimal(repr(self.trim)) * num_updates)


class Krum(DocumentValue, tag="name", name="krum", is_extras=True):
    """The update that is nearest to its neighbours (Blanchard et al., 2017,
    https://arxiv.org/abs/1703.02757). byzantine: the largest number of false updates."""

    byzantine: _ByzantineCount


class MultiKrum(DocumentValue, tag="name", name="multi_krum", is_extras=True):
    """The mean of the `keep` updates that are nearest to their neighbours; by default, of all
    updates but as many as may be false."""

    byzantine: _ByzantineCount
    keep: Annotated[int, Field(ge=1, le=MAX_ROBUST_UPDATES)] | None = None


class Bulyan(DocumentValue, tag="name", name="bulyan", is_extras=True):
    """The mean, for each element, of the values around the median of the updates that Krum has
    chosen (https://arxiv.org/abs/1802.07927)."""

    byzantine: _ByzantineCount


class GeometricMedian(DocumentValue, tag="name", name="geometric_median", is_extras=True):
    """The point with the least sum of distances to the updates, by a fixed number of Weiszfeld
    iterations from their mean (https://arxiv.org/abs/1912.13445)."""

    iterations: Annotated[int, Field(ge=1, le=1000)] = 8


class NormBound(DocumentValue, tag="name", name="norm_bound", is_extras=True):
    """The mean of the updates, each of which is shortened to a distance of at most `norm` from the
    global model (https://arxiv.org/abs/1911.07963)."""

    norm: Positive


RobustRule: TypeAlias = (
    Median | TrimmedMean | Krum | MultiKrum | Bulyan | GeometricMedian | NormBound
)


def too_few(rule: RobustRule | None, num_clients: int, quorum: float | None) -> Iterator[Violation]:
    """Yield an error if rounds of this many clients, or the quorum, do not suit a robust rule."""
    fewest = fewest_updates(rule)
    if rule is None or fewest == 1:
        return
    needs = f"needs the updates of at least {fewest}"
    if num_clients < fewest:
        yield Violation("options.robust", f"{needs} clients, and a round has {num_clients}")
    elif num_clients > MAX_ROBUST_UPDATES and ids.are_checked():
        text = f"combines at most {MAX_ROBUST_UPDATES} updates, and a round has {num_clients}"
        yield Violation("options.robust", text)
    elif type(quorum) is int and quorum < fewest:
        yield Violation("options.quorum", f"{quorum} is too few: options.robust {needs} clients")


def is_judged(rule: RobustRule | None) -> bool:
    """Return whether the robust rule compares whole updates (not element by element)."""
    return rule is not None and not isinstance(rule, Median | TrimmedMean)


def fewest_updates(rule: RobustRule | None) -> int:
    """Return the smallest number of updates with which the robust rule keeps its guarantees."""
    match rule:
        case None | NormBound():
            return 1
        case Median() | GeometricMedian():
            return _FEWEST_FOR_A_MIDDLE
        case TrimmedMean():
            fewest = _FEWEST_FOR_A_MIDDLE
            while not rule.num_trimmed(fewest):
                fewest += 1
            return fewest
        case Krum():
            return 2 * rule.byzantine + 3
        case MultiKrum():
            return max(2 * rule.byzantine + 3, (rule.keep or 0) + rule.byzantine)
        case Bulyan():
            return 4 * rule.byzantine + 3
        case _:
            assert_never(rule)


# ---- Options ----

DEFAULT_SERVER_LEARNING_RATE: Final = 0.01
DEFAULT_MAX_STALENESS: Final = 4
REFUSE: Final = "refuse"


def _check_quorum(value: object) -> int | float | None:
    """Validate a quorum and return it: an int is a number of clients, a float a fraction."""
    if value is None or (type(value) is int and 1 <= value <= MAX_UNSIGNED):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInputError(f"{value!r} is not a number")
    if type(value) is float and 0 < value <= 1:
        return value
    raise InvalidInputError(f"{value!r} is not allowed; must be a count >= 1 or a share in (0, 1]")


def _read_late_updates(value: object) -> Discount | Literal["refuse"]:
    if isinstance(value, Discount):
        return value
    if value == REFUSE:
        return REFUSE
    if not isinstance(value, Mapping) or value.keys() != {"discount"}:
        raise InvalidInputError(
            f"must be {REFUSE!r} or {{discount: d}} with d in (0, 1]; is {value!r}"
        )
    return Discount(value["discount"])


Quorum: TypeAlias = Annotated[float | int | None, PlainValidator(_check_quorum)]
LateUpdates: TypeAlias = Annotated[
    Discount | Literal["refuse"], BeforeValidator(_read_late_updates)
]
