"""Sites behind TLS that take jobs of those whom they name, as the coordinator has proved it, and
hide their updates among those alone whose keys they pin."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import StratagemError, UserCodeError
from stratagem.common.identity.certificates import Authority
from stratagem.common.identity.tls import Role
from stratagem.common.job import JobSpec
from tests.cluster.jobs import ALLOWED, assert_same_bits, events_of, federated, train
from tests.identity.rig import authority_of_cluster, cluster_of, flags
from tests.reference.loops import federated_loop

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.promise("Who submits and who takes part is what certificates say, at every site."),
]

SITES = ("worker-0", "worker-1", "worker-2")
MINTED = "worker-3"
"""Whoever holds the authority signs for one more member."""

FILE = """
site = "{name}"
peers = [{peers}]
[data.ward]
entrypoint = "tests.userland.data:per_client"
kwargs = {{client_id = {number}, num_clients = {num_sites}}}
[[accept]]
data = ["ward"]
entrypoints = ["tests.userland.*:*"]
submitters = ["client/alice"]
require = ["secure_aggregation"]
min_clients = 3
"""


def pin_of(authority: Authority, name: str) -> str:
    """The fingerprint of a worker's certificate as a site file names it."""
    certificate = authority.files(f"worker-{name}").cert
    assert certificate is not None
    read = x509.load_pem_x509_certificate(Path(certificate).read_bytes())
    return f'"sha256:{read.fingerprint(SHA256()).hex()}"'


def write_site(authority: Authority, folder: Path, number: int, peers: tuple[str, ...]) -> Path:
    name = (*SITES, MINTED)[number]
    file = folder / name / "site.toml"
    file.parent.mkdir(exist_ok=True)
    pins = ", ".join(pin_of(authority, peer) for peer in peers)
    file.write_text(FILE.format(name=name, number=number, num_sites=len(SITES), peers=pins))
    return file


def lines_of(folder: Path, name: str, kind: str = "secure") -> list[dict[str, Any]]:
    text = (folder / name / "audit.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def nobody_else_may_submit(cluster: LocalCluster, authority: Authority, spec: JobSpec) -> None:
    eve = authority.issue(Role.CLIENT, "eve")
    said = r'submitters: "client/eve" is not one of client/alice'
    with Client(cluster.address, tls=eve) as stranger, pytest.raises(UserCodeError, match=said):
        train(stranger, spec)


def test_sites_take_jobs_of_those_whom_they_name_among_those_whom_they_pin(tmp_path: Path) -> None:
    everybody = (*SITES, MINTED)
    authority = authority_of_cluster(tmp_path / "certs", everybody)
    arguments = {}
    for number, name in enumerate(everybody):
        pinned = everybody if name == MINTED else SITES
        file = write_site(authority, tmp_path, number, pinned)
        arguments[name] = [*flags(authority.files(f"worker-{name}")), "--site", str(file)]
    whole = cluster_of(authority, tmp_path / "cluster", everybody)
    sites = replace(whole, allow=[], allow_code="none", worker_arguments=arguments)
    options = {"secure_aggregation": {}, "quorum": 3}
    ours: dict[str, Any] = {"rounds": 2, "data": {"worker_local": "ward"}, "options": options}
    spec = federated(num_clients=len(SITES), **ours)
    with sites as cluster, Client(cluster.address, tls=authority.files("client-alice")) as alice:
        outcome = train(alice, spec)
        nobody_else_may_submit(cluster, authority, spec)
        rounds = [line for name in SITES for line in lines_of(tmp_path, name, "round")]
        assert {line["submitter"] for line in rounds} == {"client/alice"}
        steps = lines_of(tmp_path, SITES[0])
        assert [line["step"] for line in steps[:2]] == ["post_keys", "share_secrets"]
        assert {line["trust"] for line in steps} == {"pinned peers"}

        # The fourth is a worker of the same authority, and no site has named it.
        with pytest.raises(StratagemError, match="certificate is none of the consortium's"):
            train(alice, federated(num_clients=len(everybody), **ours))
        assert len(lines_of(tmp_path, SITES[0])) == len(steps) + 1  # it has posted keys, no more

        # A file counts with the next step: this site has put one of the others out.
        write_site(authority, tmp_path, 0, (SITES[0], SITES[2]))
        run = alice.submit(spec)
        events = events_of(run)
        left_out = [each for e in events for each in e.payload.get("left_out", ())]
        reasons = [each["reason"] for each in left_out if each["client"] == 0]
        assert reasons
        said = "client 1: its certificate is none of the consortium's that the site names"
        assert all(said in reason for reason in reasons)
        assert "UpdateReceived" not in {event.kind for event in events}
    by_rows = {"entrypoint": "tests.userland.data:per_client"}
    spoken = federated(num_clients=len(SITES), **{**ours, "data": by_rows})
    assert_same_bits(outcome.state, federated_loop(spoken, ALLOWED).state)
