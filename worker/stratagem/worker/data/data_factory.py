"""Calls the function of the user's that returns a job's data, alike wherever it is called.

The generators are seeded before the call: workers, and the processes that read rows for them, must
get the same rows. Must not know clients, steps and processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.numerics.keys import mix
from stratagem.worker.data.datasets import Dataset, as_dataset
from stratagem.worker.data.generators import generators_kept, seed_generators
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code


@dataclass(frozen=True, slots=True)
class DataFunction:
    """The part of a job's section `data` that makes data sets: entry points, and keywords."""

    entrypoint: str
    kwargs: Mapping[str, Any]
    collate: str | None


def made_data(
    function: DataFunction,
    entrypoints: EntryPoints,
    given: Mapping[str, int],
    seed: int | None,
) -> dict[str, Dataset]:
    """Returns the data sets by split. given: what the function gets beside the job's keywords, such
    as a client's number. seed: None leaves the generators as they are."""
    factory = entrypoints.bind(function.entrypoint, function.kwargs, "data")
    with generators_kept(), user_code("loading data"):
        if seed is not None:
            seed_generators(mix(seed, "data", *given.values()))
        value = factory(**given)
    if not isinstance(value, Mapping):
        raise InvalidInputError.at(
            "data.entrypoint",
            f'"{function.entrypoint}" must return a dict {{split: data set}}, '
            f"not a {type(value).__name__}",
        )
    collate = function.collate and entrypoints.resolve(function.collate, "data.collate")
    return {
        str(split): as_dataset(rows, str(split), collate or None, given)
        for split, rows in value.items()
    }
