"""deploy/compose.site.yml: a worker of a site that makes outgoing connections alone."""

import os
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from stratagem.worker.process.settings import from_command_line
from tests.deploy.compose import SERVICES, VERSION, worker
from tests.repository import ROOT

pytestmark = pytest.mark.core

FILE = ROOT / "deploy" / "compose.site.yml"
GIVEN = {"STRATAGEM_COORDINATOR": "coordinator.example.org:7070", "STRATAGEM_NAME": "st-anna"}


COMPOSE: dict[str, Any] = yaml.safe_load(
    # Of ${NAME:-default} and ${NAME:?what it is} the value.
    re.sub(
        r"\$\{(\w+):([-?])([^}]*)\}",
        lambda found: found[3] if found[2] == "-" else GIVEN[found[1]],
        FILE.read_text(),
    )
)
SITE: dict[str, Any] = COMPOSE["services"]["worker"]
PATH = {"PATH": os.environ["PATH"]}
READ_BY_TLS = {"tls_ca": "ca.crt", "tls_cert": "worker.crt", "tls_key": "worker.key"}


def test_it_dials_out_and_no_command_line_has_a_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = from_command_line(SITE["command"])
    assert (told.tunnel, told.coordinator, told.name) == (True, *GIVEN.values())
    assert told.listen.startswith("127.0.0.1:"), "where the health port is, too"
    assert not {"ports", "expose", "network_mode", "networks", "links"} & set(SITE)
    assert not told.allow_insecure_network
    assert [*COMPOSE["services"]] == ["worker"]
    assert SITE["environment"] == {"STRATAGEM_WORKER_PROXY": None}
    assert ("proxy" not in str(SITE["command"]), told.proxy) == (True, "")
    monkeypatch.setenv("STRATAGEM_WORKER_PROXY", "http://anna:secret@proxy:3128")
    assert from_command_line(SITE["command"]).proxy == "http://anna:secret@proxy:3128"


def test_its_container_may_do_as_little_as_those_of_a_cluster() -> None:
    of_cluster = SERVICES["worker"]
    same = ("restart", "logging", "read_only", "cap_drop", "security_opt", "tmpfs")
    for key in (*same, "stop_grace_period", "image"):
        assert SITE[key] == of_cluster[key], key
    assert SITE["image"].endswith(f":{VERSION}")
    assert SITE["build"] == {**of_cluster["build"], "context": ".."}
    told, base = from_command_line(SITE["command"]), worker("worker")
    same_settings = ("threads", "drain_grace_s", "data_dir", "health_port")
    assert [getattr(told, key) for key in same_settings] == [
        getattr(base, key) for key in same_settings
    ]


def test_what_it_reads_and_keeps_is_mounted_and_the_page_names_it() -> None:
    told = from_command_line(SITE["command"])
    mounts = {each.split(":")[1]: each.split(":")[2:] for each in SITE["volumes"]}
    kept = str(told.data_dir)
    assert mounts == {"/srv/site": ["ro"], "/srv/data": ["ro"], kept: []}
    assert told.import_path == ["/srv/site"]
    assert str(told.site) == "/srv/site/site.toml"
    assert f"site:{kept}" in SITE["volumes"]
    assert COMPOSE["volumes"] == {"site": {}}
    for key, file in READ_BY_TLS.items():
        assert str(getattr(told, key)) == f"/run/secrets/{file}"
    assert set(COMPOSE["secrets"]) == set(SITE["secrets"]) == set(READ_BY_TLS.values())
    page = (ROOT / "docs" / "how-to" / "tunnel.md").read_text()
    used = set(re.findall(r"\$\{(STRATAGEM_\w+):", FILE.read_text()))
    asked = used - {"STRATAGEM_TAG", "STRATAGEM_THREADS"}
    assert asked == set(re.findall(r"^(STRATAGEM_\w+)=", page, re.MULTILINE))
    for path in ("/srv/data", "/var/lib/stratagem/audit.jsonl", *READ_BY_TLS.values()):
        assert path in page


def test_docker_compose_reads_the_file_and_names_what_is_missing() -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("no docker-compose on this machine")
    command = ["docker-compose", "--file", str(FILE), "config", "--quiet"]
    done = subprocess.run(command, env=GIVEN | PATH, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in GIVEN:
        rest = {key: value for key, value in GIVEN.items() if key != name}
        done = subprocess.run(command, env=rest | PATH, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert name in done.stderr
