"""UploadCommit: make a commit whole, of which workers have kept what only each of them has.

Their files are pulled and merged with what all of them have into one blob. It is the one that a
commit with all of it would have been.
"""

import hashlib
from functools import partial
from typing import Final

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    LimitError,
    NotFoundError,
    PermissionDeniedError,
    StratagemError,
    UnavailableError,
)
from stratagem.common.base.ids import Digest
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.files import header_bytes, header_of
from stratagem.common.tensors.manifest import Limits
from stratagem.coordinator.core.effects import UploadCommit
from stratagem.coordinator.core.facts import CommitUploaded, Member, SoleCopiesLost
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.state_writing import state_writer
from stratagem.coordinator.effects.synchronous.commit_segment import merged
from stratagem.coordinator.effects.synchronous.snapshot import pull_kept
from stratagem.coordinator.runtime.worker_links import WorkerSession
from stratagem.coordinator.updates.members.merge_parts import ContradictionError, StatePart

PIECE_BYTES: Final = 1 << 20
LOST: Final = (
    *(ContradictionError, IntegrityError, InvalidInputError),
    *(LimitError, NotFoundError, PermissionDeniedError),
)
"""What says that a worker does not have the file, or not as it was."""


async def upload_commit(env: EffectContext, effect: UploadCommit) -> None:
    """Report CommitUploaded, or SoleCopiesLost where a worker does not have its file any more."""
    pulls = [
        partial(_kept, env, effect, *each) for each in zip(effect.holders, effect.kept, strict=True)
    ]
    try:
        digest, size_bytes = await merged(
            env,
            [partial(_common, env, effect), *pulls],
            partial(state_writer, env, effect.run_id),
        )
    except StratagemError as error:
        if not _is_lost(env, effect, error):
            raise
        lost = SoleCopiesLost(party=effect.party, segment=effect.segment, reason=str(error))
        await env.report(effect.run_id, lost)
        return
    failpoint("coordinator.upload.merged")
    uploaded = CommitUploaded(
        party=effect.party, segment=effect.segment, digest=digest, size_bytes=size_bytes
    )
    await env.report(effect.run_id, uploaded)


def _is_lost(env: EffectContext, effect: UploadCommit, error: StratagemError) -> bool:
    """Return True when a worker that has not sent its file will not: it does not have it, is lost,
    or has left. Of a run that has ended no other start of it is asked, and nothing is retried but
    what a worker that is there has not answered: the run could not be resumed meanwhile."""
    holders = [(holder, env.state.workers.get(holder.worker_id)) for holder in effect.holders]
    are_gone = any(record is None or not record.is_alive for _, record in holders)
    run = env.state.runs.get(effect.run_id)
    if run is None or run.ended is None:
        return isinstance(error, LOST) or (isinstance(error, UnavailableError) and are_gone)
    is_other = any(record is not None and record.member != holder for holder, record in holders)
    return not isinstance(error, UnavailableError) or are_gone or is_other


async def _common(env: EffectContext, effect: UploadCommit) -> StatePart:
    """What all members have, as it was committed."""

    def copy() -> StatePart:
        limits = Limits(max_total_bytes=env.settings.max_state_bytes)
        scratch = env.blobs.scratch()
        try:
            with env.blobs.open(effect.base.digest) as blob:
                manifest, start = header_of(blob, effect.base.digest, limits)
                blob.seek(start)
                while data := blob.read(PIECE_BYTES):
                    scratch.write(data)
        except BaseException:
            scratch.close()
            raise
        return StatePart(manifest, scratch)

    return await env.in_thread(copy)


async def _kept(
    env: EffectContext, effect: UploadCommit, holder: Member, digest: Digest
) -> StatePart:
    at = WorkerSession(holder, effect.run_id, effect.party, effect.membership)
    async with env.pulls:
        part = await pull_kept(env, at, effect.segment)
    try:
        found = await env.in_thread(lambda: _digest_of(part))
        if found != digest:
            text = f"the file of worker {holder.worker_id} has the digest {found}, not {digest}"
            raise IntegrityError(text)
    except BaseException:
        part.data.close()
        raise
    return part


def _digest_of(part: StatePart) -> str:
    sha256 = hashlib.sha256(header_bytes(part.manifest))
    for piece in part.data.read(0, part.manifest.total_bytes):
        sha256.update(piece)
    return sha256.hexdigest()
