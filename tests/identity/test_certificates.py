"""What stands in certificates and in which files they lie."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from stratagem.common.base.errors import AlreadyExistsError, InvalidInputError
from stratagem.common.identity.certificates import Authority, init, show
from stratagem.common.identity.tls import CertId, FreshFiles, Role, TlsFiles, tls_files
from stratagem.common.observe.metrics_server import Guard


def test_a_development_cluster_gets_a_certificate_for_everybody(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    made = init(folder, workers=["w0", "W_1.x"], clients=["me"], hosts=["head", "10.0.0.7"])
    shown = {path.name: show(path)[0] for path in made}
    assert {name: (each.role, each.name) for name, each in shown.items()} == {
        "ca.crt": ("authority", ""),
        "coordinator.crt": ("coordinator", "coordinator"),
        "worker-w0.crt": ("worker", "w0"),
        "worker-W_1.x.crt": ("worker", "W_1.x"),
        "client-me.crt": ("client", "me"),
    }
    assert shown["coordinator.crt"].hosts == ("localhost", "head", "127.0.0.1", "::1", "10.0.0.7")
    assert shown["worker-w0.crt"].uris == ("spiffe://stratagem/role/worker/w0",)
    assert shown["worker-w0.crt"].hosts == ("w0.worker.stratagem", "worker.stratagem")
    days = {name: (each.expires - datetime.now(UTC)).days + 1 for name, each in shown.items()}
    assert (days["ca.crt"], days["client-me.crt"]) == (3650, 90)
    for key in folder.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600, key
    assert len(list(folder.iterdir())) == 10


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "worker-w0.key").write_text("mine")
    with pytest.raises(AlreadyExistsError, match=r"worker-w0\.key"):
        init(tmp_path, workers=["w0"], clients=["me"], hosts=[])
    assert [path.name for path in tmp_path.iterdir()] == ["worker-w0.key"]
    with pytest.raises(InvalidInputError, match="worker_id"):
        init(tmp_path, workers=["../w0"], clients=[], hosts=[])


@pytest.mark.parametrize(
    ("uris", "said"),
    [
        ([], "no URI at all"),
        (["https://example.org"], "https://example.org"),
        (["spiffe://a/role/worker/w0", "spiffe://a/role/client/w0"], "must have one URI"),
        (["spiffe://a/role/king/w0"], "role 'king'"),
        (["spiffe://a/role/worker/w0/x"], "must have one URI"),
        (["spiffe://a/role/worker/"], "must have one URI"),
    ],
)
def test_an_identity_is_one_uri_of_our_form(uris: list[str], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        CertId.from_uris(uris)
    found = CertId.from_uris(["https://x", "spiffe://a.b/role/worker/w0"])
    assert (found.trust_domain, found.role, found.name) == ("a.b", Role.WORKER, "w0")
    assert CertId.from_uris([found.uri]) == found


def test_files_that_do_not_fit_are_named(authority: Authority, tmp_path: Path) -> None:
    w0, w1 = authority.files("worker-w0"), authority.files("worker-w1")
    assert w0.identity() == CertId("stratagem", Role.WORKER, "w0")
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("no certificate")
    for files, said in (
        (TlsFiles(w0.ca, w0.cert, w1.key), r"tls_key: .*worker-w1\.key is not the key of"),
        (TlsFiles(rubbish, w0.cert, w0.key), r"tls_ca: .*rubbish\.pem holds no PEM certificate"),
        (TlsFiles(w0.ca, rubbish, w0.key), r"tls_cert: .*rubbish\.pem holds no PEM"),
        (TlsFiles(w0.ca, w0.cert, rubbish), r"tls_key: .*rubbish\.pem holds no PEM key"),
        (TlsFiles(tmp_path / "gone", w0.cert, w0.key), "tls_ca: .*gone: No such file"),
        (TlsFiles(w0.ca, w0.ca, authority.folder / "ca.key"), "tls_cert: .*no URI at all"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            files.read()
    with pytest.raises(InvalidInputError, match="tls_key: is needed where tls_cert is given"):
        TlsFiles(w0.ca, w0.cert)
    with pytest.raises(InvalidInputError, match="tls_ca: is needed where tls_cert, tls_key"):
        tls_files(None, tmp_path, tmp_path, needs_cert=False)
    with pytest.raises(InvalidInputError, match="tls_cert: is needed where tls_ca is given"):
        tls_files(tmp_path, None, None, needs_cert=True)
    assert tls_files(None, None, None, needs_cert=True) is None
    assert tls_files(tmp_path, None, None, needs_cert=False) == TlsFiles(tmp_path)


def test_new_files_are_seen_once_they_fit_together(own_authority: Authority) -> None:
    files = own_authority.files("worker-w0")
    fresh = FreshFiles(files)
    assert not fresh.changed()
    before = fresh.material
    old_cert = Path(files.cert or "").read_bytes()
    own_authority.issue(Role.WORKER, "w0", renew=True)
    new_cert = Path(files.cert or "").read_bytes()
    Path(files.cert or "").write_bytes(old_cert)
    assert not fresh.changed()  # the old certificate beside the new key
    assert fresh.material == before
    Path(files.cert or "").unlink()
    assert not fresh.changed()
    Path(files.cert or "").write_bytes(new_cert)
    assert fresh.changed()
    assert fresh.material.cert == new_cert
    own_authority.issue(Role.WORKER, "w0", valid=timedelta(seconds=-1), renew=True)
    assert fresh.changed()
    assert "worker-w0.crt has expired at 2" in fresh.material.problem


def test_a_key_that_everybody_may_read_is_refused(own_authority: Authority) -> None:
    """Kubernetes mounts secrets for the group of a pod: 0440 in our manifests."""
    files = own_authority.files("worker-w0")
    key = Path(files.key or "")
    for mode in (0o600, 0o400, 0o640, 0o440, 0o660):
        key.chmod(mode)
        assert str(files.identity()) == "worker w0"
    for mode in (0o604, 0o644, 0o666, 0o602, 0o601, 0o777):
        key.chmod(mode)
        said = f"{key} has the mode {mode:04o}: everybody.*chmod 600.*its group .640."
        with pytest.raises(InvalidInputError, match=said) as refused:
            files.read()
        assert refused.value.violations[0].field == "tls_key"
    with pytest.raises(InvalidInputError, match=r"metrics_tls_key: .* has the mode 0777"):
        Guard(Path(files.cert or ""), key).ssl_context()
    (own_authority.folder / "ca.key").chmod(0o644)
    with pytest.raises(InvalidInputError, match=r"ca\.key has the mode 0644"):
        own_authority.issue(Role.WORKER, "w9")
