"""A site that decides by who has submitted a job, as the coordinator has proved it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stratagem.client.sdk.blocking_client import Client
from stratagem.common.base.errors import UserCodeError
from stratagem.common.identity.tls_files import Role
from tests.cluster.jobs import federated, train
from tests.identity.rig import WORKERS, authority_of_cluster, cluster_of, flags

pytestmark = pytest.mark.cluster

FILE = """
site = "{name}"
[data.ward]
entrypoint = "tests.userland.data:classes"
[[accept]]
data = ["ward"]
entrypoints = ["tests.userland.*:*"]
submitters = ["client/alice"]
"""


def test_a_site_takes_jobs_of_those_whom_its_file_names(tmp_path: Path) -> None:
    authority = authority_of_cluster(tmp_path / "certs")
    eve = authority.issue(Role.CLIENT, "eve")
    arguments = {}
    for name in WORKERS:
        file = tmp_path / name / "site.toml"
        file.parent.mkdir()
        file.write_text(FILE.format(name=name))
        arguments[name] = [*flags(authority.files(f"worker-{name}")), "--site", str(file)]
    whole = cluster_of(authority, tmp_path / "cluster")
    sites = replace(whole, allow=[], allow_code="none", worker_arguments=arguments)
    spec = federated(num_clients=len(WORKERS), rounds=1, data={"worker_local": "ward"})
    with sites as cluster:
        with Client(cluster.address, tls=authority.files("client-alice")) as alice:
            train(alice, spec)
        with Client(cluster.address, tls=eve) as client:
            said = r'submitters: "client/eve" is not one of client/alice'
            with pytest.raises(UserCodeError, match=said):
                train(client, spec)
    for name in WORKERS:
        lines = (tmp_path / name / "audit.jsonl").read_text().splitlines()
        rounds = [line for line in map(json.loads, lines) if line["kind"] == "round"]
        assert [line["submitter"] for line in rounds] == ["client/alice"]
