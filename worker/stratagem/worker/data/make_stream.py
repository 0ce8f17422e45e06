"""Makes the streams of a job out of what its data function returns, and refuses those that cannot
be used as the job says."""

from collections.abc import Sequence

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.job.training_rules import against_streams, says_stream
from stratagem.common.schema.document import refuse
from stratagem.common.strategy import Federated
from stratagem.worker.data.stream_checks import check_stream
from stratagem.worker.data.stream_dataset import StreamDataset, StreamedSplit

_TRAIN = "train"


def stream_of(made: StreamedSplit, job: JobSpec) -> StreamDataset:
    """Returns the streams that a job reads of a split."""
    is_trained_on = made.split == _TRAIN and not job.only_evaluates
    has_states = is_trained_on and check_stream(
        made.source, made.split, is_pure=job.execution.deterministic
    )
    streams = StreamDataset(made.source, made.split, made.collate, job, has_states)
    if is_trained_on and not isinstance(job.strategy, Federated):
        streams.check_layout()
    return streams


def check_streams(job: JobSpec, streams: Sequence[str]) -> None:
    """Refuses what cannot go with the splits that are streams. Those that a job does not use may
    be."""
    if job.evaluation is not None and job.evaluation.split in streams:
        raise InvalidInputError.at(
            "evaluation.split",
            f"'{job.evaluation.split}' is a stream of rows, and what is evaluated must have a "
            "len(); let data.entrypoint return a list of them, such as list(islice(rows, 1000))",
        )
    if job.only_evaluates:
        return
    if _TRAIN in streams:
        refuse(list(against_streams(job)))
    elif says_stream(job):
        name = "streams" if job.data.streams is not None else "shuffle_rows"
        raise InvalidInputError.at(
            f"data.{name}", "belongs to rows that come as a stream, but data.train has a len()"
        )
