"""A site whose worker is killed does a round again with the rows and the noise that it had."""

from pathlib import Path

import pytest

from stratagem.common.base.errors import StratagemError
from stratagem.common.privacy import accountant
from tests.crash.jobs import Job, crash_job, federated
from tests.crash.rig import outcome_of
from tests.crash.site_rig import sites_in

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.promise("A killed site adds the noise of a round once, and pays for it once."),
    pytest.mark.skipif(not accountant.is_installed(), reason="needs the extra privacy"),
]

JOB: Job = {
    **crash_job(federated(num_clients=2, rounds=2)),
    "data": {"worker_local": "ward"},
    "evaluation": None,
    "privacy": {
        "unit": "row",
        "clip": {"norm": 0.5},
        "noise_multiplier": 2.0,
        "target": {"epsilon": 3.0, "delta": 1e-5},
    },
}
FILE = """
entrypoint = "tests.userland.data:classes"
kwargs = {num_rows = 40}
---
require = ["privacy"]
max_epsilon = 4.0
"""
PLAIN: Job = {**JOB, "privacy": None}


def test_a_round_that_is_done_again_is_the_same_update_and_is_paid_for_once(tmp_path: Path) -> None:
    """Two draws of noise would be two updates of one round, of which an average could be taken."""
    data_dir = tmp_path / "cluster"
    with sites_in(tmp_path, lambda _number: FILE, data_dir=data_dir) as sites:
        rig = sites.rig
        with rig.armed("worker-0", "worker.round.trained", 1), rig.running(JOB) as run:
            outcome_of(run)
        sites.checked(0)
        lines = sites.rounds(0)
        assert [line["round"] for line in lines] == [1, 2, 2]
        first, before, after = lines
        assert (before["update"], before["noise"]) == (after["update"], after["noise"])
        assert first["noise"] != before["noise"]
        spent = [accountant.epsilon_after(5 * n, 2.0, 8 / 40, 1e-5) for n in (1, 2)]
        assert [line["epsilon"] for line in lines] == [spent[0], spent[1], spent[1]]
        assert not run.status().reproducible
        secrets = [path.read_bytes() for path in sorted(tmp_path.rglob("privacy-secret-*"))]
        assert len(set(secrets)) == 2
        assert {len(secret) for secret in secrets} == {32}
        assert not list((data_dir / "coordinator").rglob("privacy-secret"))
        # What the run has spent counts for the next one, and not the target that it had.
        refused = f"epsilon 3 with {spent[1]:g} of other runs is more than 4"
        with rig.running(JOB) as second, pytest.raises(StratagemError, match=refused):
            outcome_of(second)
        with rig.running(PLAIN) as third, pytest.raises(StratagemError, match="has no privacy"):
            outcome_of(third)
