"""Sites that are killed around what their clients keep: the run ends with the same bits, and they
keep the same. Where it is lost, its client begins anew, and the run says so."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.job import JobSpec
from tests.cluster.jobs import ALLOWED, assert_same_bits, gates_in
from tests.crash.failpoint_table import WITH_CLIENT_STATE, WITH_MERGED_METRICS
from tests.crash.jobs import Job, crash_job, federated
from tests.crash.rig import events_of, outcome_of
from tests.crash.site_rig import NUM_SITES, SiteRig, sites_in
from tests.jobs import user_data
from tests.patience import PATIENCE_S
from tests.reference.personal_rounds import personal_rounds
from tests.reference.scaffold_rounds import Scaffold

pytestmark = [
    pytest.mark.timeout(4 * PATIENCE_S),
    pytest.mark.promise("What a client keeps is the same whatever dies, or is said to be lost."),
]

ROUNDS = 4
HEAD = ["3.*"]
COUNTS = "tests.userland.metrics:ClassCounts"
"""Its states are sums: they are merged after each round."""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteRig]:
    folder = tmp_path_factory.mktemp("sites")

    def file_of(number: int) -> str:
        return f"""
entrypoint = "tests.userland.data:gated_clients"
kwargs = {{folder = "{folder}", client_id = {number}, num_clients = 2}}
---
metrics = ["accuracy", "{COUNTS}"]
"""

    with sites_in(folder, file_of) as made:
        yield made


PERSONAL, SCAFFOLD = {"personal": HEAD}, {"control": "scaffold"}
DITTO = {"ditto": {"lambda": 0.5}}


def ward_job(options: Job, **sections: Any) -> Job:
    strategy = federated(NUM_SITES, ROUNDS) | {"options": options}
    if options is SCAFFOLD:
        sections["optimizer"] = {"name": "sgd", "lr": 0.1}
    return {**crash_job(strategy), "data": {"worker_local": "ward"}, **sections}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(PERSONAL, marks=pytest.mark.soak),
        pytest.param(DITTO, marks=pytest.mark.sweep),
        pytest.param(SCAFFOLD, marks=pytest.mark.sweep),
    ],
    ids=["layers", "ditto", "control"],
)
def test_no_crash_changes_what_clients_keep(sites: SiteRig, options: Job) -> None:
    """Every kill is in a round of its own, or in its evaluation."""
    rig = sites.rig
    job = ward_job(options, evaluation={"split": "train", "metrics": ["accuracy", COUNTS]})
    rig.settle()
    assert {
        "worker.client_state.before_sync",
        "worker.client_state.after_sync",
    } == WITH_CLIENT_STATE
    assert {"coordinator.sums.merged", "worker.sums.measured"} == WITH_MERGED_METRICS

    def trained() -> tuple[Any, Any, list[bytes]]:
        with rig.running(job) as run:
            outcome = outcome_of(run)
            files = [sites.kept(run.run_id, n) / f"round-{ROUNDS}.safetensors" for n in (0, 1)]
            assert run.status().reproducible
            assert run.status().metrics[f"train.{COUNTS}.rows"] == 46
            return outcome.digests, outcome.metrics, [_tensors(file) for file in files]

    expected = trained()
    with (
        rig.armed("worker-1", "worker.client_state.before_sync", 1),
        rig.armed("worker-0", "worker.client_state.after_sync", 2),
        rig.armed("coordinator", "coordinator.round.pulled", 6),
        rig.armed("coordinator", "coordinator.round.folded", 3),
        rig.armed("coordinator", "coordinator.sums.merged", 1),
        rig.armed("worker-0", "worker.sums.measured"),
    ):
        disturbed = trained()
    assert disturbed == expected


def _tensors(file: Path) -> bytes:
    """The file behind its header, which names the run."""
    data = file.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(PERSONAL, marks=pytest.mark.sweep),
        pytest.param(SCAFFOLD, marks=pytest.mark.soak),
    ],
    ids=["layers", "control"],
)
def test_a_client_that_has_lost_its_state_begins_anew(sites: SiteRig, options: Job) -> None:
    rig, job = sites.rig, ward_job(options, evaluation=None)
    rig.settle()
    plain = {**job, "data": user_data("gated_clients", folder="nowhere")}
    plain["strategy"] = federated(NUM_SITES, ROUNDS)
    spec = JobSpec.parse({name: each for name, each in plain.items() if each is not None})

    def forgets(*at: int) -> bool:
        return at == (3, 1)

    if options is SCAFFOLD:
        expected = Scaffold(spec, ALLOWED, forgets=forgets).state
    else:
        expected = personal_rounds(spec, ALLOWED, HEAD, forgets=forgets)[0].state
    in_round_3 = "client1-8"  # three batches of 23 rows in each round
    with gates_in(sites.folder) as gates, rig.running({**job, "evaluation": None}) as run:
        gates.close(in_round_3)
        gates.wait_reached(in_round_3)
        shutil.rmtree(sites.kept(run.run_id, 1))
        num_starts = rig.cluster.processes["worker-1"].num_starts
        rig.cluster.kill("worker-1")
        rig.cluster.wait_restarted("worker-1", num_starts, timeout_s=PATIENCE_S)
        gates.open()
        events = list(events_of(run))
        assert_same_bits(run.state_dict(), expected)
        assert not run.status().reproducible
    lost = [event for event in events if event.kind == "ClientStateLost"]
    assert [(each.payload["round_num"], each.payload["client"]) for each in lost] == [(3, 1)]
    assert "worker-1 has nothing of round 2 as it was kept" in lost[0].sentence
