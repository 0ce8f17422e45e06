"""In which form states come into the store: as one file each, or in leaves."""

from stratagem.common.base.ids import Digest, RunId
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.core.state_machine.pending_effects import blobs_of
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.store.blobs.blob_store import StateWriter, file_writer
from stratagem.coordinator.store.leaves.leaf_blobs import LeafBlobs


def leaves_in(env: EffectContext) -> LeafBlobs | None:
    """Return the store in which states become leaves; None where they are files."""
    blobs = env.blobs
    return blobs if isinstance(blobs, LeafBlobs) and blobs.writes_leaves else None


def kept_states(env: EffectContext, run_id: RunId) -> list[Digest]:
    """Return the blobs of a run that are kept now, from which a new state of it may take leaves,
    the newest commit first."""
    run = env.state.runs.get(run_id)
    if run is None:
        return []
    kept = blobs_of(run)
    commits = [commit.digest for commit in reversed(run.commits) if commit.digest in kept]
    return [*commits, *sorted(kept - {*commits})]


def may_write_leaves(env: EffectContext, leaves: LeafBlobs, member: Member) -> bool:
    """Return whether a worker may be asked for leaves: it has said that it sees the folder of
    states, on a trusted network; or in an object store, that it takes signed requests."""
    record = env.state.workers.get(member.worker_id)
    if record is None:
        return False
    if leaves.signs is not None:
        return record.capability.takes_signed_requests
    return record.capability.writes_states and record.capability.data_plane == "trusted"


async def reads_by_itself(env: EffectContext, member: Member, digest: Digest) -> bool:
    """Return whether a state is in leaves that a worker sees: it asks for it if it does not."""
    blobs = env.blobs
    if not isinstance(blobs, LeafBlobs) or blobs.signs is not None:
        return False
    if not may_write_leaves(env, blobs, member):
        return False
    return await env.in_thread(lambda: blobs.is_in_leaves(digest))


def state_writer(env: EffectContext, run_id: RunId, manifest: Manifest) -> StateWriter:
    """Return a writer for the data of a state of a run."""
    leaves = leaves_in(env)
    if leaves is None:
        return file_writer(env.blobs, manifest)
    return leaves.state_writer(manifest, kept_states(env, run_id))
