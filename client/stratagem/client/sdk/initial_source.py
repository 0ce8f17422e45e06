"""Turns what a job begins from, an earlier run or a file, into the digest of a stored state.

Done before the job is submitted, so that the run says for good what it began from.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Final

from stratagem.client.sdk import views
from stratagem.client.sdk.connection.retrying_calls import Connection
from stratagem.client.sdk.resumed_job import (
    check_resumed_job,
    check_steps_left,
    counted,
    schedule_note,
)
from stratagem.client.sdk.uploads import send
from stratagem.common.base.errors import InvalidInputError, NotFoundError
from stratagem.common.base.ids import Digest
from stratagem.common.job import InitialSpec, JobSpec
from stratagem.common.schema.json import frozen
from stratagem.common.tensors.files import blob_digest, from_file, read_header
from stratagem.common.tensors.manifest import Purpose
from stratagem.v1 import coordinator_pb2 as pb

_FINAL: Final = "final"


async def resolve_initial(connection: Connection, job: JobSpec) -> tuple[JobSpec, str]:
    """Return the job with `initial` as a digest, and what its author should know about that.

    Raises NotFoundError for a run, a state or a file that is not there, InvalidInputError for a
    file that is no safetensors file.
    """
    initial, note = job.initial, ""
    if initial is None or initial.digest is not None:
        return job, note
    if initial.run is not None:
        spec, note = await _of_run(connection, job, initial.run, initial.which or _FINAL)
    else:
        assert initial.file is not None  # exactly one of the three is set
        spec = InitialSpec(digest=await _upload(connection, Path(initial.file)))
    # Read anew: what concerns several sections is checked with what has been found.
    return JobSpec.parse({**job.document(), "initial": spec.document()}), note


async def _of_run(
    connection: Connection, job: JobSpec, run_id: str, which: str
) -> tuple[InitialSpec, str]:
    response = await connection.call(connection.stub.GetRun, pb.GetRunRequest(run_id=run_id))
    status = views.run_status(response.run)
    commit = status.commit(which)
    if commit is None:
        kept = ", ".join(str(stored.segment) for stored in status.commits) or "nothing"
        text = f"initial.which: run {run_id} has no state {which!r}; kept is {kept}"
        raise NotFoundError(text)
    digest = Digest(commit.digest)
    if job.initial is not None and job.initial.resume:
        check_resumed_job(status.job, job)
        check_steps_left(status, commit, job)
        spec = InitialSpec(
            digest=digest,
            resume=True,
            step=commit.step,
            metrics=counted(commit.metrics, JobSpec.parse(status.job), job) or None,
            average=Digest(commit.average) if commit.average else None,
        )
        return spec, schedule_note(status, commit, job)
    return InitialSpec(digest=digest, trained_with=frozen(commit.hyperparameters) or None), ""


async def _upload(connection: Connection, path: Path) -> Digest:
    try:
        manifest, data_start = read_header(path)
    except OSError as error:
        raise InvalidInputError.at("initial.file", f"{path}: {error.strerror}") from error
    content = from_file(path, data_start, manifest.total_bytes)
    digest = await asyncio.to_thread(lambda: blob_digest(manifest, content(0)))
    await send(connection, replace(manifest, purpose=Purpose.DATA, digest=digest), content)
    return digest
