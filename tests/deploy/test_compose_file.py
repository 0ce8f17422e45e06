"""docker-compose.yml and the Dockerfile agree with each other and with what our processes take."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from sqlalchemy import make_url

from stratagem.coordinator.process.main import STOP_GRACE_S as COORDINATOR_STOP_GRACE_S
from stratagem.coordinator.store.bucket import check_url, credentials_from_file
from stratagem.worker.process.main import STOP_GRACE_S as WORKER_STOP_GRACE_S
from stratagem.worker.process.settings import from_command_line
from tests.deploy.compose import (
    COMPOSE,
    DOCKER,
    DOCKERFILE,
    FILE,
    FOREIGN,
    OWN,
    SERVICES,
    TLS_COMPOSE,
    TLS_FILE,
    TLS_SERVICES,
    VERSION,
    WORKERS,
    coordinator,
    instructions,
    port_of,
    worker,
)
from tests.repository import ROOT

pytestmark = pytest.mark.core


# ---- docker-compose.yml ----


def test_both_generations_of_compose_know_the_keys() -> None:
    """1.29 refuses `name`, `include`, `develop` and `depends_on.required`."""
    known = {"services", "secrets", "volumes"}
    assert {key for key in COMPOSE if not key.startswith("x-")} == known
    for service in SERVICES.values():
        assert set(service.get("depends_on", [])) <= set(SERVICES)
        assert isinstance(service.get("depends_on", []), list)
        assert not {"develop", "container_name", "hostname"} & set(service)


@pytest.mark.docker
def test_docker_compose_reads_the_files_with_and_without_certificates() -> None:
    """With them each process has the files that it is told of, beside those it has without."""
    if shutil.which("docker-compose") is None:
        pytest.skip("no docker-compose on this machine")
    for profile in ("", "gpu", "s3", "postgres", "observability"):
        flags = ["--profile", profile] if profile else []
        command = ["docker-compose", "--file", str(FILE), *flags, "config", "--quiet"]
        subprocess.run(command, check=True, capture_output=True)
    flags = ["--profile", "gpu", "--file", str(FILE), "--file", str(TLS_FILE)]
    command = ["docker-compose", *flags, "config"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    merged = yaml.safe_load(done.stdout)["services"]
    assert set(merged) == set(SERVICES)
    services = {name: merged[name] for name in OWN}
    assert "allow-insecure-network" not in str(services)
    for name, service in services.items():
        given = {f"/run/secrets/{each['source']}" for each in service["secrets"]}
        told = [each.partition("=") for each in service["command"]]
        files = {value for flag, _, value in told if flag.startswith("--tls-")}
        assert len(files) == 3
        assert files <= given
        for secret in SERVICES[name].get("secrets", []):
            assert f"/run/secrets/{secret}" in given


def test_certificates_change_nothing_but_who_may_connect() -> None:
    """Without its TLS flags each command is that of docker-compose.yml; and workers go by the pool
    in their certificate, so that each container has a name of its own which it covers."""
    assert set(TLS_SERVICES) == set(OWN)
    for name, service in TLS_SERVICES.items():
        base = [each for each in SERVICES[name]["command"] if "secure" not in each]
        own = [each for each in service["command"] if not each.startswith(("--tls-", "--pool="))]
        assert own == base
        assert set(service) - {"command", "secrets"} <= {"profiles"}
    page = (ROOT / "docs" / "how-to" / "deploy-compose.md").read_text()
    for name in WORKERS:
        told = from_command_line(TLS_SERVICES[name]["command"])
        assert told.worker_id == f"{socket.gethostname()}.{told.pool}"
        own = [f"pool-{told.pool}.{end}" for end in ("crt", "key")]
        assert TLS_SERVICES[name]["secrets"] == ["ca.crt", *own]
        assert f"certs init certs --host coordinator --pool {told.pool}\n" in page
    files = {Path(each["file"]).name for each in TLS_COMPOSE["secrets"].values()}
    assert files == set(TLS_COMPOSE["secrets"])
    assert files == {file for each in TLS_SERVICES.values() for file in each["secrets"]}


@pytest.mark.parametrize("name", SERVICES)
def test_containers_may_do_little_and_have_the_version_of_the_project(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    # PostgreSQL's image would need capabilities to leave root, and has its socket in /run.
    exceptions = {"user": "postgres", "tmpfs": ["/tmp", "/run/postgresql"]}
    expected = exceptions if name == "postgres" else {"tmpfs": ["/tmp"]}
    assert {key: service[key] for key in ("user", "tmpfs") if key in service} == expected
    assert service["restart"] == "unless-stopped"
    if name in OWN:
        assert service["image"].endswith(f":{VERSION}")
        target = service["build"]["target"]
        assert target in re.findall(r"^FROM runtime AS (\w+)$", DOCKERFILE, re.MULTILINE)
    assert not {"privileged", "network_mode", "pid", "ipc", "cap_add"} & set(service)


def test_ports_agree() -> None:
    own = coordinator()
    published = SERVICES["coordinator"]["ports"]
    assert published == [f"127.0.0.1:7070:{port_of(own.listen)}"]
    for name in WORKERS:
        told = worker(name)
        assert told.coordinator == f"coordinator:{port_of(own.listen)}"
        assert "ports" not in SERVICES[name]
        ports = {port_of(told.listen), told.health_port, told.metrics_port}
        assert set(map(str, ports)) == exposed("worker")
        assert told.health_port == port_of(json.loads(health_command())[-1])
    ports = {port_of(own.listen), own.health_port, own.metrics_port}
    assert set(map(str, ports)) == exposed("coordinator")
    assert own.health_port == port_of(json.loads(health_command())[-1])


def exposed(target: str) -> set[str]:
    stage = DOCKERFILE.partition(f"FROM runtime AS {target}\n")[2].partition("FROM")[0]
    found = re.search(r"^EXPOSE +(.*)$", stage, re.MULTILINE)
    return set(found[1].split()) if found else set()


def health_command() -> str:
    return DOCKERFILE.partition("HEALTHCHECK")[2].partition("CMD ")[2].partition("\n")[0]


DEFAULTS = dict(line.partition("=")[::2] for line in instructions("ARG"))
"""Of the arguments of a build."""


def test_workers_have_the_same_settings_and_all_have_time_to_stop() -> None:
    """Up to the device; threads are part of the numerics."""
    for name in WORKERS:
        told = worker(name)
        assert told.model_copy(update={"device": "cpu"}) == worker("worker")
        assert SERVICES[name]["volumes"][1] == str(told.data_dir)
        needed_s = told.drain_grace_s + WORKER_STOP_GRACE_S
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > needed_s
    grace_s = int(SERVICES["coordinator"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > 2 * COORDINATOR_STOP_GRACE_S
    volume, _, path = SERVICES["coordinator"]["volumes"][0].partition(":")
    assert volume in COMPOSE["volumes"], "what must survive"
    assert str(coordinator().data_dir) == path


@pytest.mark.parametrize("name", FOREIGN)
def test_images_of_others_are_pinned_and_stay_out_unless_asked_for(name: str) -> None:
    service = SERVICES[name]
    version = r"v?\d+\.\d+(\.\d+)?|RELEASE\.\d{4}(-\d\d){2}T(\d\d-){2}\d\dZ"
    assert re.fullmatch(rf"([a-z]+/)?[a-z]+:({version})", service["image"])
    assert service["profiles"] in (["observability"], ["s3"], ["postgres"])
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    for source, target, *mode in (volume.split(":") for volume in service["volumes"]):
        if source.startswith("."):
            assert mode == ["ro"], target
            assert (ROOT / source).exists()
        else:
            assert source in COMPOSE["volumes"]


# ---- the profile s3 ----


def test_keys_are_files_and_none_where_no_object_store_is_used() -> None:
    files = {name: each["file"] for name, each in COMPOSE["secrets"].items()}
    assert set(files.values()) == {"/dev/null"}
    used = {secret for service in SERVICES.values() for secret in service.get("secrets", [])}
    assert used == set(files)
    environment = SERVICES["coordinator"]["environment"]
    assert environment["AWS_SHARED_CREDENTIALS_FILE"] == "/run/secrets/s3_credentials"
    assert SERVICES["s3"]["environment"]["MINIO_CONFIG_ENV_FILE"] == "/run/secrets/s3_server"
    for service in SERVICES.values():
        for name in service.get("environment", {}):
            is_file = name.endswith("_FILE")
            assert is_file or not re.search(r"SECRET|PASSWORD|TOKEN|ACCESS_KEY", name)


def test_states_and_journal_are_in_a_folder_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in the bucket and the database of the servers once it is told so."""
    environment, server = SERVICES["coordinator"]["environment"], SERVICES["postgres"]
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value or ""))
    told = coordinator()
    assert (told.blob_store, told.journal) == ("", "")
    assert "--address :9000" in SERVICES["s3"]["entrypoint"][-1]
    assert environment["AWS_ENDPOINT_URL"] == "http://s3:9000"
    assert str(told.journal_password_file) == server["environment"]["POSTGRES_PASSWORD_FILE"]
    for service in (server, SERVICES["coordinator"]):
        assert "journal_password" in service["secrets"]
    assert {"s3", "postgres"} <= set(DEFAULTS["COORDINATOR_EXTRAS"].split(","))


def test_server_and_coordinator_have_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, folder = runpy.run_path(str(DOCKER / "s3_secrets.py"))["main"], tmp_path / "s3"

    def made() -> tuple[dict[str, str], list[str]]:
        make(folder)
        named = dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines())
        return named, [p.read_text() for p in sorted(folder.iterdir())]

    named, contents = made()
    assert made() == (named, contents)
    text = FILE.read_text()
    assert all(f"${{{name}:-" in text for name in named)
    check_url(named["STRATAGEM_BLOB_STORE"])
    assert "mkdir -p /data/stratagem " in SERVICES["s3"]["entrypoint"][-1]
    read = credentials_from_file({"AWS_SHARED_CREDENTIALS_FILE": named["S3_CREDENTIALS"]})
    assert read is not None
    keys = read()
    told = Path(named["S3_SERVER_SECRETS"]).read_text()
    assert f"MINIO_ROOT_USER={keys['access_key_id']}\n" in told
    assert f"MINIO_ROOT_PASSWORD={keys['secret_access_key']}\n" in told
    assert folder.stat().st_mode & 0o077 == 0
    (folder / "server").unlink()
    with pytest.raises(SystemExit, match="credentials is there, and its keys fit no other file"):
        make(folder)


def test_the_server_has_the_database_that_the_documentation_names() -> None:
    page = (ROOT / "docs" / "how-to" / "deploy-compose.md").read_text()
    (named,) = set(re.findall(r'postgresql://[^\s`"]+', page))
    url, server = make_url(named), SERVICES["postgres"]["environment"]
    assert (url.username, url.database) == (server["POSTGRES_USER"], server["POSTGRES_DB"])
    assert (url.host, url.password) == ("postgres", None)
    asked = SERVICES["postgres"]["healthcheck"]["test"]
    assert {f"--username={url.username}", f"--dbname={url.database}"} <= set(asked)


# ---- the Dockerfile ----


def test_an_engine_without_buildkit_builds_it_and_malloc_is_left_to_the_processes() -> None:
    """Defaults of the build are said once."""
    assert not re.search(r"^(RUN|COPY) +--(mount|link|chmod|parents)", DOCKERFILE, re.MULTILINE)
    assert not [word for word in ("# syntax", "<<", "MALLOC", "LD_PRELOAD") if word in DOCKERFILE]
    for service in (SERVICES[name] for name in OWN):
        for name, value in service["build"]["args"].items():
            is_gpu = "gpu" in service.get("profiles", [])
            assert DEFAULTS[name] == value or (name == "TORCH_INDEX_URL" and is_gpu)


def test_the_images_run_as_nobody_without_a_shell() -> None:
    (user,) = instructions("USER")
    assert user == "10001:10001"
    for command in [*instructions("ENTRYPOINT"), health_command()]:
        program, flag, module, *_ = json.loads(command)
        assert (program, flag) == ("python", "-m")
        assert any(ROOT.glob(f"*/{module.replace('.', '/')}*"))


def test_the_engine_gets_all_that_is_copied() -> None:
    sent = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = {
        source
        for line in instructions("COPY")
        if not line.startswith("--from")
        for source in line.split()[:-1]
    }
    assert copied == sent
    for path in copied:
        assert (ROOT / path).exists(), path


def test_requirements_are_those_of_the_extras() -> None:
    script = runpy.run_path(str(DOCKER / "requirements.py"))["requirements"]

    def printed(*extras: str) -> str:
        return "\n".join(script(ROOT / "pyproject.toml", extras))

    for_coordinator = printed("coordinator")
    assert "grpcio>=" in for_coordinator
    assert "sqlalchemy>=" in for_coordinator
    assert "torch" not in for_coordinator
    for wrong, said in (
        ("wroker", "'wroker' is not one of coordinator, worker"),
        ("local", "name"),
    ):
        with pytest.raises(SystemExit, match=said):
            printed(wrong)
    command = [sys.executable, str(DOCKER / "requirements.py"), str(ROOT / "pyproject.toml")]
    done = subprocess.run([*command, "worker,s3,examples"], check=True, capture_output=True)
    assert b"\nscikit-learn>=" in done.stdout
