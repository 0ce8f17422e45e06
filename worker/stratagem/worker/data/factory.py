"""Call the user's function that returns a job's data, in the same way wherever it is called.

The generators are seeded before the call: workers, and the processes that read rows for them, must
get the same rows. The module knows neither clients nor steps nor processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.job.rules import STREAM
from stratagem.common.numerics.keys import mix
from stratagem.common.schema.document import refuse
from stratagem.common.schema.table import found_in
from stratagem.common.strategy import Federated
from stratagem.worker.data.checks import check_stream
from stratagem.worker.data.datasets import Dataset, as_dataset
from stratagem.worker.data.rows import generators_kept, seed_generators
from stratagem.worker.data.streams import StreamDataset, StreamedSplit
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code

# ---- Data function ----


@dataclass(frozen=True, slots=True)
class DataFunction:
    """The entry points and keywords of a job's section `data` that determine its data sets."""

    entrypoint: str
    kwargs: Mapping[str, Any]
    collate: str | None


def made_data(
    function: DataFunction,
    entrypoints: EntryPoints,
    given: Mapping[str, int],
    seed: int | None,
) -> dict[str, Dataset]:
    """Return the data sets by split. given: the arguments of the function besides the job's
    keywords, such as a client's number. seed: None leaves the generators unchanged."""
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


# ---- Streams of a job ----
#
# The streams are made from the result of the data function; unfit ones are refused.

_TRAIN = "train"


def stream_of(made: StreamedSplit, job: JobSpec) -> StreamDataset:
    """Return a split's streams in the layout that the job defines."""
    is_trained_on = made.split == _TRAIN and not job.only_evaluates
    has_states = is_trained_on and check_stream(
        made.source, made.split, is_pure=job.execution.deterministic
    )
    streams = StreamDataset(made.source, made.split, made.collate, job, has_states)
    if is_trained_on and not isinstance(job.strategy, Federated):
        streams.check_layout()
    return streams


def check_streams(job: JobSpec, streams: Sequence[str]) -> None:
    """Raise InvalidInputError for settings that do not fit streams, in splits that the job uses."""
    if job.evaluation is not None and job.evaluation.split in streams:
        raise InvalidInputError.at(
            "evaluation.split",
            f"'{job.evaluation.split}' is a stream of rows, and what is evaluated must have a "
            "len(); let data.entrypoint return a list of them, such as list(islice(rows, 1000))",
        )
    if job.only_evaluates:
        return
    if _TRAIN in streams:
        refuse(list(found_in(STREAM, job)))
    elif job.data.is_stream:
        name = "streams" if job.data.streams is not None else "shuffle_rows"
        raise InvalidInputError.at(
            f"data.{name}", "belongs to rows that come as a stream, but data.train has a len()"
        )
