"""The coordinator's streams and its barrier: downloads, uploads, backups, rendezvous."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    LimitError,
    NotFoundError,
    UnavailableError,
)
from stratagem.common.base.ids import Digest, Party, RunId, check_digest
from stratagem.common.identity.callers import Caller, current_caller
from stratagem.common.job import JobSpec
from stratagem.common.privacy import accountant
from stratagem.common.rpc.tensor_transfer import receive_header, receive_upload, serve_get
from stratagem.common.tensors.files import header_bytes, header_of
from stratagem.common.tensors.manifest import Limits, Manifest, Purpose, from_proto
from stratagem.common.tensors.stream import CHUNK_BYTES, ChunkWriter
from stratagem.coordinator.app.app import App
from stratagem.coordinator.app.keeping import Backups
from stratagem.coordinator.core.commands import ClaimData
from stratagem.coordinator.core.retention import has_brought, is_shared, resting_with, runs_with
from stratagem.coordinator.core.run_view import RunView
from stratagem.coordinator.runtime.rendezvous import Arrival
from stratagem.coordinator.service.limits import Keys, Places
from stratagem.coordinator.service.workers import investigate
from stratagem.coordinator.store.blobs import BlobStore, DamagedBlobError, MissingBlobError
from stratagem.coordinator.store.files import NoSpaceError
from stratagem.v1 import coordinator_pb2 as pb

M = TypeVar("M", pb.DownloadStateResponse, pb.DownloadBlobResponse)

DIGESTS_AT_ONCE: Final = 10_000
"""The number of digests in one message of a backup."""

MAX_RUNS_NAMED: Final = 5
"""The most runs that the error about a damaged blob names."""


def which(run: RunView, name: str) -> Digest:
    """Return the digest of the state that a client names: final, best, a segment's number, average
    (of the final state), or predictions."""
    if name in ("", "final", "average"):
        if run.commits:
            final = run.commits[-1]
            return (name == "average" and final.average) or final.digest
        raise NotFoundError(f"run {run.run_id!r} has committed nothing yet")
    if name == "best":
        best = next((commit.digest for commit in run.commits if commit.is_best), None)
        if best is None:
            raise NotFoundError(f"run {run.run_id!r} has no best state: set evaluation.best")
        return best
    if name == "predictions":
        if run.predictions:
            return run.predictions
        raise NotFoundError(f"run {run.run_id!r} has no predictions: set evaluation.predictions")
    by_name = {str(commit.segment): commit.digest for commit in run.commits}
    if name in by_name:
        return by_name[name]
    named = [("final", bool(run.commits)), ("best", any(commit.is_best for commit in run.commits))]
    names = ", ".join([*(name for name, is_there in named if is_there), *by_name]) or "none"
    raise NotFoundError(f"run {run.run_id!r} has no state {name[:80]!r}; kept are {names}")


async def download(
    blobs: BlobStore, digest: Digest, offset: int, make: Callable[[], M]
) -> AsyncIterator[M]:
    """Yield a blob as messages of a tensor stream; every byte is checked before it is sent."""
    file = await asyncio.to_thread(blobs.open, digest)
    with file:
        manifest, _ = await asyncio.to_thread(header_of, file, digest)
        manifest = replace(manifest, digest=digest, is_in_leaves=file.is_in_leaves)
        content = file.source()
        async for response in serve_get(make, manifest, content, offset, file.check):
            yield response


async def download_of_any(
    app: App, digest: Digest, offset: int
) -> AsyncIterator[pb.DownloadBlobResponse]:
    """Yield a blob for a backup. Raises IntegrityError if it is damaged or missing, naming the runs
    and segments that need it: a backup knows only digests."""
    try:
        async for response in download(app.blobs, digest, offset, pb.DownloadBlobResponse):
            yield response
    except (DamagedBlobError, MissingBlobError) as error:
        state = app.loop.state
        views = await app.loop.recorded.views(resting_with(state, digest))
        runs = runs_with(state, digest, views)
        if not runs:
            raise
        names = "; ".join(runs[:MAX_RUNS_NAMED])
        names += f"; and {len(runs) - MAX_RUNS_NAMED} more" if len(runs) > MAX_RUNS_NAMED else ""
        raise IntegrityError(
            f"{error}. It is of run {names}: put a sound copy in its place, or delete what needs it"
        ) from error


async def back_up(backups: Backups, by: str) -> AsyncIterator[pb.BackUpResponse]:
    """Yield the current journal, and the digests of the blobs that the journal needs."""
    async with backups.snapshot(by) as snapshot:
        size = snapshot.journal.stat().st_size
        yield pb.BackUpResponse(term=snapshot.term, journal_bytes=size)
        for start in range(0, len(snapshot.digests), DIGESTS_AT_ONCE):
            yield pb.BackUpResponse(digests=snapshot.digests[start : start + DIGESTS_AT_ONCE])
        with snapshot.journal.open("rb") as file:
            while piece := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield pb.BackUpResponse(journal=piece)


class Uploads:
    """Receives uploads of data sets, within limits."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._places = Places("max_uploads", app.settings.max_uploads)
        self._digests = Keys("uploads the data set")

    async def receive(
        self, requests: AsyncIterator[pb.UploadDataRequest]
    ) -> AsyncIterator[pb.UploadDataResponse]:
        """Store an uploaded data set under its digest. Raises LimitError if there is no room."""
        settings = self._app.settings
        header = (await receive_header(requests, settings.stream_idle_timeout_s)).header
        limits = Limits(
            max_tensors=settings.max_state_tensors, max_total_bytes=settings.max_state_bytes
        )
        manifest = from_proto(header.manifest, limits, Purpose.DATA)
        digest, caller = check_digest(header.digest), current_caller()
        # Other callers must not learn whether the bytes are here: they send all of them.
        is_theirs = caller.is_admin or has_brought(self._app.loop.state, caller.owner, digest)
        if is_theirs and await asyncio.to_thread(self._app.blobs.keep, digest):
            yield pb.UploadDataResponse(resume_offset=manifest.total_bytes)
            yield pb.UploadDataResponse(committed=True)
            return
        key = (caller.owner, digest)
        with self._digests.holding(key, digest), self._places.place():
            stored = _store(self._app, caller, digest, manifest, requests)
            async with aclosing(stored) as responses:
                try:
                    async for response in responses:
                        yield response
                except NoSpaceError as error:  # the sender need not wait until space is freed
                    raise LimitError(str(error)) from error


async def _store(
    app: App,
    caller: Caller,
    announced: Digest,
    manifest: Manifest,
    requests: AsyncIterator[pb.UploadDataRequest],
) -> AsyncGenerator[pb.UploadDataResponse, None]:
    idle_timeout_s = app.settings.stream_idle_timeout_s
    prefix = header_bytes(manifest)
    writer = app.blobs.writer(len(prefix) + manifest.total_bytes)
    digest = hashlib.sha256(prefix)
    writer.write(prefix)

    def take(_offset: int, data: bytes) -> None:
        digest.update(data)
        writer.write(data)

    async def commit() -> None:
        if digest.hexdigest() != announced:
            raise IntegrityError(f"the data have the digest {digest.hexdigest()}")
        await asyncio.to_thread(writer.commit)
        if caller.is_known:
            await app.loop.submit(ClaimData(caller.owner, announced))

    chunks = ChunkWriter(manifest.total_bytes, take)
    try:
        async for response in receive_upload(
            requests, pb.UploadDataResponse, chunks, commit, idle_timeout_s
        ):
            yield response
    finally:
        writer.abort()


async def check_job(app: App, job_json: str, caller: Caller, *, is_new: bool) -> None:
    """Check the size of a job's graph, and that the data, code and state that it names are stored
    here and usable by the caller. A refusal does not reveal what other callers have uploaded.
    is_new: keep the named blobs for the job; a known run has them already."""
    max_graph_nodes = app.settings.max_graph_nodes
    job = await asyncio.to_thread(JobSpec.from_json, job_json)
    num_nodes = job.model.graph.num_nodes() if job.model.graph is not None else 0
    if num_nodes > max_graph_nodes:
        raise LimitError(
            f"max_graph_nodes: the graph has {num_nodes}, the limit is {max_graph_nodes}"
        )
    await asyncio.to_thread(_check_privacy, app, job)
    is_here = partial(_is_here, app, caller, is_new=is_new)
    inline, initial, code = job.data.inline, job.initial, job.code
    for name, section in (("initial", initial), ("code", code)):
        if section is not None and section.digest is None:
            text = "is to be turned into a digest by the client; `stratagem run` and the SDK do so"
            raise InvalidInputError.at(name, text)
    by = f" by {caller.name}" if caller.is_known else ""
    if initial is not None and not await is_here(initial.digest):
        where = f"is here that was uploaded{by} or committed by a run"
        raise NotFoundError(f"initial.digest: no state {initial.digest} {where}")
    average = None if initial is None else initial.average
    if average is not None and not await is_here(average):
        raise NotFoundError(f"initial.average: no state {average} is here, or may be named{by}")
    if inline is not None and not await is_here(inline):
        raise NotFoundError(f"data.inline: no data set {inline} was uploaded{by}")
    if code is not None and not await is_here(code.digest):
        raise NotFoundError(f"code.digest: no code {code.digest} was uploaded{by}")


def _check_privacy(app: App, job: JobSpec) -> None:
    """Check that this coordinator can account a private run and has a secret for its noise, unless
    sites use secrets of their own."""
    if job.privacy is None or (job.privacy.unit == "row" and job.data.worker_local is not None):
        return
    if not accountant.is_installed():
        raise InvalidInputError.at("privacy", f"the coordinator {accountant.NEEDED}")
    if job.privacy.noise == "secret":
        app.env.runs.secret.check_usable()


async def _is_here(app: App, caller: Caller, digest: Digest | None, *, is_new: bool) -> bool:
    """Return True if a blob is stored here and the caller may name it; a new run's blob is kept."""
    if digest is None or not may_name(app, caller, digest):
        return False
    return not is_new or await app.kept.keep(digest)


def may_name(app: App, caller: Caller, digest: Digest) -> bool:
    """Return True if a job of the caller may name a blob, wherever it is stored; see
    `core/retention.py`."""
    state = app.loop.state
    is_theirs = caller.is_admin or has_brought(state, caller.owner, digest)
    return is_theirs or is_shared(state, digest)


async def rendezvous(
    app: App, run_id: RunId, party: Party, membership: int, rank: int, arrival: Arrival
) -> tuple[Arrival, ...]:
    """Wait until all members of a party are here; return their arrivals. Investigate late ones."""
    try:
        async with asyncio.timeout(app.settings.rendezvous_timeout_s):
            return await app.barriers.join(run_id, party, membership, rank, arrival)
    except TimeoutError:
        missing = app.barriers.missing(run_id, party, membership)
        reason = f"members {', '.join(map(str, missing))} stayed away from the rendezvous"
        await investigate(app, run_id, party, membership, reason)
        raise UnavailableError(reason) from None
