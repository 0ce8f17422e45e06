"""Named places in the code at which a test can kill this process.

A failpoint is armed by a file `<directory>/<name>`; STRATAGEM_FAILPOINTS names the directory. The
file holds the number of hits to let pass (empty: 0), counted over all processes that share the
directory; the next hit removes the file and ends the process as `kill -9` would. Without the
variable a failpoint does nothing. A process reads the variable once, because a training step passes
several failpoints.
"""

import fcntl
import functools
import os
import sys
from pathlib import Path
from typing import Final

DIRECTORY_VARIABLE: Final = "STRATAGEM_FAILPOINTS"
EXIT_CODE: Final = 137

FAILPOINTS: Final = (
    "coordinator.replay.done",
    "coordinator.push.begun",
    "coordinator.build.pulled",
    "coordinator.segment.trained",
    "coordinator.snapshot.copied",
    "coordinator.parts.described",
    "coordinator.leaves.gathered",
    "coordinator.commit.pulled",
    "coordinator.upload.merged",
    "coordinator.step.summed",
    "coordinator.round.pulled",
    "coordinator.silo.collected",
    "coordinator.region.summed",
    "coordinator.round.judged",
    "coordinator.round.folded",
    "coordinator.privacy.accounted",
    "coordinator.secure.keys_gathered",
    "coordinator.secure.shares_gathered",
    "coordinator.secure.signed",
    "coordinator.secure.opened",
    "coordinator.evaluation.gathered",
    "coordinator.outputs.gathered",
    "coordinator.sums.merged",
    "coordinator.run.released",
    "coordinator.journal.before_commit",
    "coordinator.journal.after_commit",
    "coordinator.history.merging",
    "coordinator.blobs.before_rename",
    "coordinator.blobs.after_rename",
    "coordinator.objects.after_part",
    "coordinator.objects.after_put",
    "coordinator.spool.after_checkpoint",
    "coordinator.spool.before_rename",
    "coordinator.spool.after_rename",
    "coordinator.spool.before_delete",
    "coordinator.fold.after_window",
    "worker.step.before_backward",
    "worker.step.before_apply",
    "worker.slices.updated",
    "worker.parameters.gathered",
    "worker.parameters.updated",
    "worker.mirror.offered",
    "worker.step.after_apply",
    "worker.turns.after_turn",
    "worker.phases.predicted",
    "worker.batch.evaluated",
    "worker.metrics.measured",
    "worker.sums.measured",
    "worker.evaluation.shown",
    "worker.client_round.after_training",
    "worker.client_state.before_sync",
    "worker.client_state.after_sync",
    "worker.secure.keys_made",
    "worker.secure.update_kept",
    "worker.secure.opening_kept",
    "worker.secure.answered",
    "worker.execute.accepted",
    "worker.snapshot.asked",
    "worker.pieces.asked",
    "worker.leaf.joined",
    "worker.leaf.unnamed",
    "worker.leaf.untold",
    "worker.leaf.half_sent",
    "worker.leaf.stored",
    "worker.blob.committed",
    "worker.code.unpacked",
    "worker.build.done",
    "worker.gossip.loaded",
    "worker.local_step.before_backward",
    "worker.gossip.before_mix",
    "worker.gossip.mixing",
    "worker.gossip.after_mix",
    "worker.replicas.loaded",
    "worker.replicas.kept",
    "worker.outer_step.before_exchange",
    "worker.outer_step.applied",
    "worker.stages.joined",
    "worker.stages.loaded",
    "worker.stages.before_backward",
    "worker.stages.before_apply",
    "worker.stages.after_apply",
    "worker.rendezvous.answered",
    "worker.rendezvous.joined",
    "worker.state.received",
    "worker.segment.finished",
    "worker.snapshot.taken",
    "worker.snapshot.compared",
    "worker.round.trained",
    "worker.audit.before_line",
    "worker.audit.within_line",
    "worker.audit.after_line",
)
"""The names of all failpoints; a test checks that the source has exactly these."""


@functools.cache
def directory_of_this_process() -> str | None:
    """Return the directory of armed failpoints, or None; the environment variable is read once."""
    return os.environ.get(DIRECTORY_VARIABLE)


os.register_at_fork(after_in_child=directory_of_this_process.cache_clear)


def failpoint(name: str) -> None:
    """Kill this process at this place if a test has armed the failpoint of this name."""
    directory = directory_of_this_process()
    if not directory:
        return
    assert name in FAILPOINTS, f"failpoint {name} is not declared"
    try:
        descriptor = os.open(Path(directory) / name, os.O_RDWR)
    except FileNotFoundError:
        return
    if _is_due(descriptor, Path(directory) / name):
        print(f"failpoint {name}: exit {EXIT_CODE}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


def _is_due(descriptor: int, path: Path) -> bool:
    """Count one hit of an armed failpoint; return whether the process must die now."""
    with os.fdopen(descriptor, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink == 0:  # another process died at it meanwhile
            return False
        countdown = int(file.read().strip() or "0")
        if countdown == 0:
            path.unlink()
            return True
        file.seek(0)
        file.truncate()
        file.write(str(countdown - 1))
        return False
