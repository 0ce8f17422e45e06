"""What `stratagem doctor --worker-settings` says of settings that do not fit this machine."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stratagem.common.identity.certificates import make_authority
from stratagem.common.identity.tls import Role
from stratagem.common.observe.findings import Finding, Level
from stratagem.tools.doctor import _advertising, examine, local_findings
from stratagem.v1 import types_pb2
from stratagem.worker.process.settings import WorkerSettings
from tests.jobs import ALLOW

OWN = types_pb2.Environment(
    open_files_limit=4096,
    malloc="malloc: tuned for chunks of a tensor stream",
    shared_memory_bytes=2**30,
    backends=["gloo"],
)


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of settings are put on the path as in a worker, but not for other tests."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def settings(**changes: Any) -> WorkerSettings:
    well: dict[str, Any] = {"coordinator": "127.0.0.1:1", "name": "w0", "allow": [ALLOW]}
    return WorkerSettings(**{**well, "threads": 1, **changes})


def troubles(**changes: Any) -> Iterator[Finding]:
    for each in local_findings(settings(**changes), OWN):
        if each.level is not Level.OK:
            assert each.advice, each
            yield each


def trouble(**changes: Any) -> tuple[str, str, str]:
    """The only one: (check, level, everything that is said)."""
    (found,) = troubles(**changes)
    return found.check, found.level.value, f"{found.found} -> {found.advice}"


def test_all_is_well(tmp_path: Path) -> None:
    save_file({"train.x": torch.zeros(1)}, tmp_path / "data.safetensors")
    everything = settings(
        data_dir=tmp_path / "made" / "by the worker",
        data_root=[str(tmp_path)],
        import_path=[str(tmp_path)],
        local_data={"mine": str(tmp_path / "data.safetensors")},
        activation_store=f"file://{tmp_path}/store",
    )
    found = local_findings(everything, OWN)
    assert [each for each in found if each.level is not Level.OK] == []
    told = {each.check: each.found for each in found}
    assert told["local data"] == "mine: train.x"
    assert told["disk"].endswith(f"will be made in {tmp_path}")
    assert {"torch", "numerics", "precision", "allow", "data root"} <= set(told)
    assert {"import path", "activation store"} <= set(told)


@pytest.mark.parametrize(
    ("changes", "check", "level", "words"),
    [
        ({"device": "cuda:77"}, "device", "fail", "--device cpu"),
        ({"data_dir": Path("/etc/passwd/x")}, "disk", "fail", "cannot be made in /etc"),
        ({"data_root": ["/nowhere"]}, "data root", "fail", "/nowhere is no folder"),
        ({"import_path": ["/nowhere"]}, "import path", "fail", "/nowhere is no folder"),
        ({"local_data": {"mine": "/nowhere"}}, "local data", "fail", "mine: "),
        ({"local_data": {"mine": "/etc/passwd"}}, "local data", "fail", "NAME=FILE"),
        ({"activation_store": "file:///proc/none"}, "activation store", "fail", "/proc/none"),
        ({"threads": 4096}, "threads", "warn", ""),
        ({"allow": []}, "allow", "warn", "nothing"),
        ({"allow": ["*:*"]}, "allow", "warn", "any module"),
        ({"allow": ["numpy"]}, "allow", "fail", "matches no entry point"),
        ({"allow": ["nowhere.*:*"]}, "allow", "fail", 'no module "nowhere"'),
        ({"allow": ["tests.userland.models:gone"]}, "allow", "fail", 'no attribute "gone"'),
        ({"allow": ["tests.worker_shell.test_doctor_broken:*"]}, "allow", "fail", "cannot be foun"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Any], check: str, level: str, words: str) -> None:
    found = trouble(**changes)
    assert found[:2] == (check, level)
    assert words in found[2]


SITE = """
site = "st-anna"
[data.ward]
entrypoint = "{entrypoint}"
[[accept]]
data = ["ward"]
"""


@pytest.mark.parametrize(
    ("entrypoint", "level", "words"),
    [
        ("tests.userland.data:classes", "ok", "st-anna: ward; 1 rule"),
        ("tests.userland.data:gone", "fail", 'no attribute "gone"'),
        ("nowhere.data:rows", "fail", "data.ward.entrypoint: 'nowhere.data:rows' cannot be found"),
        ("classes", "fail", "data.ward.entrypoint: 'classes' is not of the form"),
    ],
)
def test_the_file_of_a_site(tmp_path: Path, entrypoint: str, level: str, words: str) -> None:
    file = tmp_path / "site.toml"
    file.write_text(SITE.format(entrypoint=entrypoint))
    findings = local_findings(settings(site=file, allow=[]), OWN)
    assert not any(each.check == "allow" for each in findings)
    (found,) = (each for each in findings if each.check == "site")
    assert found.level.value == level
    assert words in found.found


def test_a_module_that_raises_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    check, level, said = trouble(allow=["raises_at_import:*"])
    assert (check, level) == ("allow", "fail")
    assert "no licence" in said


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, "ok", "dial 127.0.0.1"),
        ({"coordinator": "203.0.113.1:7070"}, "fail", "which is themselves"),
        ({"advertise": "no-such-host.invalid"}, "warn", "no known name"),
        ({"coordinator": "203.0.113.1:7070", "advertise": "203.0.113.2:7"}, "ok", "203.0.113.2"),
    ],
)
def test_how_others_reach_it(changes: dict[str, Any], level: str, words: str) -> None:
    (found,) = _advertising(settings(**changes))
    assert found.level.value == level
    assert words in found.found


def failures(**changes: Any) -> dict[str, str]:
    return {
        each.check: each.found
        for each in asyncio.run(examine(settings(**changes)))
        if each.level is Level.FAIL
    }


def test_a_coordinator_away_a_taken_port_and_certificates_that_do_not_fit(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    authority.issue(Role.WORKER, "w1")
    files = authority.files("worker-w1")
    tls = {"tls_ca": files.ca, "tls_cert": files.cert, "tls_key": files.key}
    assert "it must be of worker w0" in failures(**tls)["settings"]
    found = failures(**tls, name="w1", mesh="gloo")
    assert "gloo encrypts nothing" in found["settings"]
    assert failures(tls_ca=files.ca).keys() == {"settings"}
    found = failures(metrics_port=0, metrics_client_ca=files.ca)
    assert found["settings"].startswith("metrics_client_ca: needs TLS")
    assert failures() == {"connection": "nobody listens there: connection refused"}
    assert failures(listen="0.0.0.0:0").keys() == {"connection", "settings"}


def test_a_worker_with_a_tunnel_needs_no_port_no_address_and_no_other_workers() -> None:
    elsewhere = {"coordinator": "coordinator.invalid:7070", "allow_insecure_network": True}
    found = asyncio.run(examine(settings(tunnel=True, **elsewhere)))
    (listening,) = (each for each in found if each.check == "listen")
    assert (listening.level, listening.found) == (Level.OK, "nobody dials it: it has a tunnel")
    assert not {"advertise", "exchange"} & {each.check for each in found}
    dialled = asyncio.run(examine(settings(**elsewhere)))
    (advertising,) = (each for each in dialled if each.check == "advertise")
    assert advertising.level is Level.FAIL
