"""Secret noise survives a kill of the coordinator, and is never drawn anew."""

from pathlib import Path

import pytest

from stratagem.common.base.errors import StratagemError
from stratagem.common.privacy import accountant
from tests.cluster.jobs import Gates
from tests.crash.jobs import JOBS, PRIVACY, Job, federated, gated
from tests.crash.rig import Rig, await_event, outcome_of

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.promise("Secret noise survives a kill of the coordinator."),
    pytest.mark.skipif(not accountant.is_installed(), reason="needs the extra privacy"),
]

SECRET: Job = {**JOBS["Private"], "privacy": {**PRIVACY, "noise": "secret"}}


def states(folder: Path) -> set[str]:
    """All states in the store; one that no fact names stays there for ten minutes."""
    return {path.name for path in (folder / "coordinator" / "blobs").rglob("*") if path.is_file()}


def test_a_fold_that_is_done_again_makes_the_state_that_it_made(rig: Rig) -> None:
    """Two draws of noise would be two states of one round, of which an average could be taken."""
    before = states(rig.cluster.folder)
    with rig.armed("coordinator", "coordinator.round.folded", 1), rig.running(SECRET) as run:
        outcome = outcome_of(run)
    made = {name.partition(".")[0] for name in states(rig.cluster.folder) - before}
    rounds = {outcome.digests["", number] for number in (1, 2, 3)}
    assert rounds <= made <= {*rounds, outcome.digests["", 0]}
    assert not run.status().reproducible
    other = rig.outcome(SECRET)
    assert other.digests.items() & outcome.digests.items() == {(("", 0), outcome.digests["", 0])}


def test_a_run_whose_secret_is_lost_does_not_go_on_before_it_is_back(
    rig: Rig, gates: Gates
) -> None:
    file = rig.cluster.folder / "coordinator" / "privacy-secret"
    private = {"privacy": SECRET["privacy"]}
    gates.close("client0-3", "client1-3", "client2-3")  # of two batches in each round
    with rig.running(gated(federated(), gates.folder, **private)) as run:
        await_event(run, "SegmentCommitted")
        kept = file.rename(file.with_name("kept"))
        gates.open()
        with pytest.raises(StratagemError, match=f"privacy secret is lost: {file} is not there"):
            run.result()
        run.resume()
        with pytest.raises(StratagemError, match="the privacy secret is lost"):
            run.result()
        assert not file.exists()
        kept.rename(file)
        run.resume()
        assert len(outcome_of(run).digests) == 4
    text = (rig.cluster.folder / "logs" / "coordinator.log").read_bytes()
    assert file.read_bytes() not in text
    assert file.read_bytes().hex().encode() not in text
