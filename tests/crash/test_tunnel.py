"""Faults of tunnelled workers: whatever breaks, and wherever, the run ends with the same bits."""

from collections.abc import Iterator

import pytest

from stratagem.client.local.cluster import LocalCluster
from tests import connect_proxy
from tests.crash.failure_logs import LOGS
from tests.crash.jobs import JOBS
from tests.crash.rig import NUM_WORKERS, Rig, cluster_with_failpoints, outcome_of
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.timeout(3 * PATIENCE_S),
    pytest.mark.promise("A tunnel is dug again when either end dies, and no bits change."),
]

NUM_CUTS, CUT_AFTER_BYTES = 6, 8_000_000
NO_EXCEPTIONS = {"no_proxy": "", "no_grpc_proxy": ""}


def tunnelled(*arguments: str) -> LocalCluster:
    """A cluster whose workers make outgoing connections only."""
    names = [f"worker-{number}" for number in range(NUM_WORKERS)]
    return cluster_with_failpoints(
        environment=NO_EXCEPTIONS,
        worker_arguments={name: ["--tunnel", *arguments] for name in names},
    )


@pytest.fixture(scope="module")
def shared_tunnels() -> Iterator[Rig]:
    with tunnelled() as cluster, cluster.client() as client:
        yield Rig(cluster, client)


@pytest.fixture
def tunnels(shared_tunnels: Rig, request: pytest.FixtureRequest) -> Rig:
    request.node.stash[LOGS] = shared_tunnels.logs
    shared_tunnels.settle()
    return shared_tunnels


@pytest.mark.parametrize(
    ("process", "failpoint", "name"),
    [
        ("worker-0", "worker.step.before_apply", "ParameterServer"),
        ("coordinator", "coordinator.spool.after_checkpoint", "FedAvg-large"),
    ],
)
def test_processes_die_at_either_end_of_a_tunnel(
    rig: Rig, tunnels: Rig, process: str, failpoint: str, name: str
) -> None:
    expected = rig.undisturbed(name)
    with tunnels.armed(process, failpoint):
        assert tunnels.outcome(JOBS[name]) == expected


def test_tunnels_break_in_the_middle_of_transfers(rig: Rig) -> None:
    """Every connection through the proxy is cut once it has carried a fifth of the parameters."""
    expected = rig.undisturbed("FedAvg-large")
    arguments = ("--cuts", str(NUM_CUTS), "--cut-after", str(CUT_AFTER_BYTES))
    with (
        connect_proxy.running(*arguments) as proxy,
        tunnelled("--proxy", f"http://{proxy.address}") as cluster,
        cluster.client() as client,
    ):
        assert outcome_of(client.submit(JOBS["FedAvg-large"])) == expected
        assert {worker.address for worker in client.workers()} == {""}
    assert proxy.said is not None
    assert proxy.said.count("cut") == NUM_CUTS
