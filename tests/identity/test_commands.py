"""`stratagem certs` and `stratagem token`, and settings that make no sense."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stratagem.client.cli.main import assemble
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.identity.callers import Scope, read_tokens
from stratagem.common.identity.certificates import Authority, show
from stratagem.common.identity.tls import TlsFiles
from stratagem.common.rpc.server import make_server
from stratagem.coordinator.app import storage
from stratagem.worker.process.host import WorkerSecurity
from tests.settings import coordinator_settings, worker_settings

HASH = re.compile(r"[0-9a-f]{64}")


def invoke(*arguments: str, exit_code: int = 0) -> Any:
    result = CliRunner().invoke(assemble(), arguments)
    assert result.exit_code == exit_code, result.output
    return result


def test_certs_for_development(tmp_path: Path) -> None:
    folder = str(tmp_path / "certs")
    made = invoke("certs", "init", folder, "--worker", "w0", "--worker", "w1", "--host", "head")
    shown = invoke("certs", "show", folder).output
    assert sorted(made.output.split()) == sorted(shown.split())
    assert re.search(r"/ca\.crt: authority, until 2.* UTC$", shown, re.MULTILINE)
    uri = "spiffe://stratagem/role/worker/w1"
    text = rf"/worker-w1\.crt: worker w1, until .*\n    {uri}, w1\.worker\.stratagem, worker\."
    assert re.search(text, shown)
    again = invoke("certs", "init", folder, exit_code=1)
    assert "is there already; name another folder" in again.stderr
    wrong = invoke("certs", "show", f"{folder}/ca.key", exit_code=1)
    assert "ca.key holds no PEM certificate" in wrong.stderr
    assert "http" not in wrong.stderr  # to pages about programming with a library


def test_certs_for_a_pool(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    shown = invoke("certs", "init", str(folder), "--pool", "gpu").output
    names = r"spiffe://stratagem/role/pool/gpu, \*\.gpu\.worker\.stratagem, worker\.stratagem"
    assert re.search(rf"/pool-gpu\.crt: worker \*\.gpu, until .*\n    {names}\n", shown)
    assert not list(folder.glob("worker-*"))
    key = (folder / "pool-gpu.key").read_bytes()
    invoke("certs", "issue", str(folder), "--renew")
    assert (folder / "pool-gpu.key").read_bytes() != key
    assert show(folder / "pool-gpu.crt")[0].uris == ("spiffe://stratagem/role/pool/gpu",)
    invoke("certs", "issue", str(folder), "--pool", "b.cpu", "--worker", "w0")
    assert {path.name for path in folder.glob("*-*.crt")} == {
        *("client-me.crt", "pool-b.cpu.crt", "pool-gpu.crt", "worker-w0.crt")
    }
    wrong = invoke("certs", "issue", str(folder), "--pool", "*.gpu", exit_code=1)
    assert "'*.gpu' is not" in wrong.stderr


def test_certs_are_revoked_by_name_or_one_by_one(tmp_path: Path) -> None:
    folder, path = tmp_path / "certs", tmp_path / "revoked"
    invoke("certs", "init", str(folder), "--worker", "w0")
    for _ in range(2):
        one = str(folder / "worker-w0.crt")
        names = ("client/me", "worker/*.gpu", one)
        invoke("certs", "revoke", *names, "--revoked-file", str(path))
    *holders, single = path.read_text().splitlines()
    assert (holders, len(single)) == (["client me", "worker *.gpu"], len("sha256:") + 64)
    wrong = invoke("certs", "revoke", "me", "--revoked-file", str(path), exit_code=1)
    assert "'me' is neither a file nor one of coordinator/NAME, worker/NAME" in wrong.stderr
    with pytest.raises(InvalidInputError, match="revoked_file: needs --tls-ca"):
        storage.CoordinatorSecurity(coordinator_settings(revoked_file=path))
    with pytest.raises(InvalidInputError, match="revoked_file: needs --tls-ca"):
        WorkerSecurity(worker_settings(coordinator="h:1", name="w0", revoked_file=path))


def test_certs_for_more_and_again(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    invoke("certs", "init", str(folder), "--host", "head")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    invoke("certs", "issue", str(folder), "--worker", "w1", "--client", "bob")
    added = {"worker-w1.crt", "worker-w1.key", "client-bob.crt", "client-bob.key"}
    assert {path.name for path in folder.iterdir()} == set(before) | added
    assert all((folder / name).read_bytes() == content for name, content in before.items())
    TlsFiles(folder / "ca.crt", folder / "worker-w1.crt", folder / "worker-w1.key").read()
    again = invoke("certs", "issue", str(folder), "--worker", "w1", exit_code=1)
    assert "is there already" in again.stderr
    renewed = invoke("certs", "issue", str(folder), "--renew", "--days", "3").stdout
    assert renewed.count("until") == 5
    assert show(folder / "coordinator.crt")[0].hosts == ("localhost", "head", "127.0.0.1", "::1")
    for name, content in before.items():
        assert ((folder / name).read_bytes() == content) == name.startswith("ca."), name
    for arguments, said in (
        ((str(tmp_path), "--worker", "w"), "was not made by `stratagem certs init`"),
        ((str(folder),), "name a worker or a client, or renew all"),
        ((str(folder), "--worker", "a/b"), "worker_id: 'a/b' is not"),
    ):
        assert said in invoke("certs", "issue", *arguments, exit_code=1).stderr


def test_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    where = ("--tokens-file", str(file))
    made = invoke("token", "create", "ci", *where, "--scopes", "read,submit", "--expires", "12h")
    assert made.stdout.startswith("stratagem_")
    assert made.stdout.strip() not in file.read_text()
    assert HASH.search(file.read_text())
    invoke("token", "create", "ops", *where, "--scopes", "admin", "--expires", "never")
    assert [each.scopes for each in read_tokens(file)] == [
        (Scope.READ, Scope.SUBMIT),
        (Scope.ADMIN,),
    ]
    listed = invoke("token", "list", *where).output
    assert re.search(r"ci +read, submit +2\d{3}-", listed)
    assert re.search(r"ops +admin +never", listed)
    for arguments, said in (
        (("ci",), "has a token 'ci' already"),
        (("x", "--scopes", "all"), "scopes: 'all' is not one of read, submit, admin"),
        (("x", "--expires", "soon"), "expires: 'soon' is not a time"),
        (("a b",), "name: 'a b' is not"),
    ):
        assert said in invoke("token", "create", *arguments, *where, exit_code=1).stderr
    invoke("token", "revoke", "ci", *where)
    assert [each.name for each in read_tokens(file)] == ["ops"]
    assert "there are: ops" in invoke("token", "revoke", "ci", *where, exit_code=1).stderr


def test_a_wrong_file_of_the_caller_is_named(authority: Authority, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    for arguments, said in (
        (("--tls-ca", gone), f"error: tls_ca: {gone}: No such file or directory"),
        (("--token-file", gone), f"error: token_file: {gone}: No such file or directory"),
        (("--tls-cert", gone), "error: tls_ca: is needed where tls_cert is given"),
    ):
        assert (
            said in invoke("list", "--coordinator", "127.0.0.1:1", *arguments, exit_code=1).stderr
        )


def coordinator(**settings: Any) -> storage.CoordinatorSecurity:
    return storage.CoordinatorSecurity(coordinator_settings(**settings))


def files_of(authority: Authority, name: str) -> dict[str, Any]:
    files = authority.files(name)
    return {"tls_ca": files.ca, "tls_cert": files.cert, "tls_key": files.key}


def test_a_coordinator_refuses_settings_that_make_no_sense(
    authority: Authority, tmp_path: Path
) -> None:
    mine, tokens = files_of(authority, "coordinator"), {"tokens_file": tmp_path / "tokens.json"}
    assert coordinator().gate.trust_domain == ""
    assert coordinator(**mine).gate.trust_domain == "stratagem"
    assert coordinator(**tokens).gate.tokens is not None
    assert coordinator(**mine, **tokens, token_listen="127.0.0.1:0").gate.tokens is not None
    for settings, said in (
        (files_of(authority, "worker-w0"), "is of worker w0; the role must be coordinator"),
        ({"tls_ca": mine["tls_ca"]}, "tls_cert: is needed where tls_ca is given"),
        (mine | tokens, "tokens_file: needs --token-listen"),
        (mine | {"token_listen": "127.0.0.1:0"}, "token_listen: needs --tokens-file"),
        (tokens | {"token_listen": "127.0.0.1:0"}, "token_listen: needs --tokens-file, --tls-ca"),
        (
            tokens | {"listen": "0.0.0.0:0", "allow_insecure_network": True},
            "tokens would come to 0.0.0.0 in plaintext",
        ),
        ({"listen": "7070", **tokens}, "listen: '7070' is not HOST:PORT"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            coordinator(**settings)


async def test_only_probes_are_in_plaintext_beside_certificates(authority: Authority) -> None:
    mine = files_of(authority, "coordinator")
    for settings, is_open in ((mine, True), ({}, False), ({"allow_insecure_network": True}, True)):
        security, server = coordinator(**settings, listen="0.0.0.0:0"), make_server()
        if is_open:
            assert security.listen_for_probes(server) > 0
        else:
            with pytest.raises(InvalidInputError, match="can be reached from other machines"):
                security.listen_for_probes(server)
        await server.stop(None)


def worker(name: str = "w0", **settings: Any) -> WorkerSecurity:
    made = worker_settings(coordinator="c:1", name=name, **settings)
    return WorkerSecurity(made)


def test_a_worker_refuses_settings_that_make_no_sense(authority: Authority) -> None:
    mine = files_of(authority, "worker-w0")
    assert (worker().data_plane, worker().mesh) == ("trusted", "auto")
    assert (worker(**mine).data_plane, worker(**mine).mesh) == ("tls", "grpc")
    trusted = worker(**mine, data_plane="trusted", mesh="gloo")
    assert (trusted.data_plane, trusted.mesh) == ("trusted", "gloo")
    assert worker(**mine, mesh="grpc").mesh == "grpc"
    assert worker(**files_of(authority, "pool-gpu"), pool="gpu").gate.trust_domain == "stratagem"
    for settings, said in (
        (mine | {"name": "w1"}, "is of worker w0; it must be of worker w1, as --name and"),
        (mine | {"pool": "gpu"}, "is of worker w0; it must be of worker w0.gpu"),
        (files_of(authority, "pool-gpu"), r"is of worker \*\.gpu; it must be of worker w0, as"),
        (files_of(authority, "pool-gpu") | {"pool": "cpu"}, "it must be of worker w0.cpu"),
        (files_of(authority, "client-alice"), "is of client alice; it must be of worker w0"),
        ({"data_plane": "tls"}, "data_plane: tls needs --tls-ca"),
        (mine | {"mesh": "gloo"}, "mesh: gloo encrypts nothing; use grpc"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            assert worker(**settings).mesh
