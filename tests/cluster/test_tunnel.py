"""Workers that nobody can dial: over real processes, the same bits as of those that are dialled."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from tests.crash.jobs import JOBS, PIPELINE, crash_job
from tests.crash.rig import outcome_of
from tests.jobs import ALLOW
from tests.repository import ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("workers that nobody can dial train with the same bits and have no port"),
]

# The stages meet in the object store of the machine that both clusters are on.
STAGES = crash_job({**PIPELINE, "communication": {"protocol": "DataStore"}})
TRAINED = {"ParameterServer": JOBS["ParameterServer"], "DataStore": STAGES}


@pytest.fixture(scope="module")
def tunnelled(
    tmp_path_factory: pytest.TempPathFactory, activations: Path
) -> Iterator[LocalCluster]:
    """Workers without a port: the folder's own have one."""
    with LocalCluster(
        workers=3,
        threads=1,
        data_dir=tmp_path_factory.mktemp("tunnelled"),
        import_path=[ROOT],
        allow=[ALLOW],
        environment={"STRATAGEM_WORKER_ACTIVATION_STORE": f"file://{activations}"},
        worker_arguments={f"worker-{number}": ["--tunnel"] for number in range(3)},
    ) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "name", ["ParameterServer", pytest.param("DataStore", marks=pytest.mark.sweep)]
)
def test_bits_are_those_of_workers_that_are_dialled(
    tunnelled: LocalCluster, client: Client, name: str
) -> None:
    with tunnelled.client() as through_tunnels:
        assert {worker.address for worker in through_tunnels.workers()} == {""}
        mine = outcome_of(through_tunnels.submit(TRAINED[name]))
    assert mine == outcome_of(client.submit(TRAINED[name]))
    check_no_ports(tunnelled)


def check_no_ports(tunnelled: LocalCluster) -> None:
    """None of its processes listens on TCP, so a firewall may keep everything out."""
    ports = {
        int(line.split()[1].rpartition(":")[2], 16): line.split()[9]
        for family in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    }
    for name in tunnelled.worker_names:
        folder = Path(f"/proc/{tunnelled.processes[name].pid}/fd")
        links = {str(link.readlink()) for link in folder.iterdir() if link.is_symlink()}
        assert not [port for port, inode in ports.items() if f"socket:[{inode}]" in links], name
