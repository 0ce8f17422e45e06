"""Number the rules that decide the bits of a run: a run keeps the number that it began with.

    1   as before there were numbers: only finishes runs that began under it
    2   gradient norms are added up in blocks; one contributor is returned as it is; codecs get the
        mean gradient; phase training and `vsa` as their pages say
    3   a metric of the user's own is computed once, of all rows of a split; before, it was the mean
        over batches; the generators are seeded before the function that returns the data is called
    4   a job without `execution.precision` keeps the dtypes of its model; before, it meant Single.
        Parameters are made contiguous; before, they kept the layout of the model, and an exchange
        made wrong updates of those that were not. A run fails at the end of a segment whose
        parameters are not finite; before, it went on

A rule that has changed is one function, which takes the number; its caller passes on the run's. A
number is removed once no run can have it.
"""

from typing import Final

from stratagem.common.base.errors import InvalidInputError

FIRST: Final = 1
"""The numerics rules number of runs and plans that record none."""

CURRENT: Final = 4
"""The numerics rules number that every newly submitted run gets."""

KEEPS_DTYPES: Final = 4
"""The first rules number under which the model's dtypes stay without `execution.precision`."""

LAYS_OUT_PARAMETERS: Final = 4
"""The first rules number under which parameters are made contiguous."""

REFUSES_INFINITE: Final = 4
"""The first rules number under which a run fails when parameters are no longer finite."""

OF_SILENT_WORKERS: Final = 2
"""The newest rules number that workers of early versions know, which report no number."""


def knows(newest: int, number: int) -> bool:
    """Return whether a worker knows the numerics rules with this number. newest: the newest number
    that the worker reports; 0 if it reports none."""
    return (newest or OF_SILENT_WORKERS) >= number


def check_numerics(number: int) -> int:
    """Validate a run's rules number and return it, FIRST for 0. Raises InvalidInputError if this
    process does not know the number."""
    if not 0 <= number <= CURRENT:
        raise InvalidInputError.at(
            "numerics",
            f"{number} is not known here, which knows {FIRST} to {CURRENT}: the run follows rules "
            "of a newer version; upgrade this process",
        )
    return number or FIRST
