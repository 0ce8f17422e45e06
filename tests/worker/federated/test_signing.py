"""Workers that sign with the keys of certificates: whose count, whom a site believes, renewal."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from stratagem.common.base.errors import InvalidInputError, UnauthenticatedError
from stratagem.common.identity import certificates
from stratagem.common.identity.callers import RevokedFile, add_revoked
from stratagem.common.identity.certificates import Authority, make_authority
from stratagem.common.identity.tls import Role, TlsFiles
from stratagem.worker.federated.secure_secrets import SignedIdentity, WorkerSigner, is_signed_by
from stratagem.worker.site.file import PeerPins
from tests.worker.federated.round_of_clients import RoundOfClients, secure_job, worker

ALL = (0, 1, 2, 3)
TEXT = b"a text"
ROOT = b"\7" * 32


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority of the cluster, which its operator holds, with four workers."""
    made = make_authority(tmp_path_factory.mktemp("operator") / "certs")
    for client in ALL:
        made.issue(Role.WORKER, f"site-{client}")
    made.issue(Role.CLIENT, "alice")
    return made


def files_of(operator: Authority, client: int) -> TlsFiles:
    return operator.files(f"worker-site-{client}")


def leaf_of(files: TlsFiles) -> x509.Certificate:
    assert files.cert is not None
    return x509.load_pem_x509_certificate(Path(files.cert).read_bytes())


def pins_of(*files: TlsFiles) -> PeerPins:
    return PeerPins(frozenset(leaf_of(each).fingerprint(SHA256()).hex() for each in files))


def signed_by(files: TlsFiles) -> SignedIdentity:
    return WorkerSigner(files).identity(ROOT)


@contextmanager
def replaced(files: TlsFiles, operator: Authority, name: str) -> Iterator[None]:
    """Another certificate and key of the same name in the place of a worker's, as renewal puts."""
    paths = [Path(str(path)) for path in (files.cert, files.key)]
    before = [path.read_bytes() for path in paths]
    operator.issue(Role.WORKER, name, renew=True)
    try:
        yield
    finally:
        for path, content in zip(paths, before, strict=True):
            path.write_bytes(content)


# ---- signatures ----

KEYS: dict[str, Any] = {
    "elliptic curve": lambda: ec.generate_private_key(ec.SECP384R1()),
    "Ed25519": Ed25519PrivateKey.generate,
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
}


def files_with(folder: Path, operator: Authority, key: Any, names: x509.Extension[Any]) -> TlsFiles:
    """A certificate of the operator's authority for a key of any kind."""
    folder.mkdir()
    authority, signer = certificates.signer(operator.folder)
    end = operator.end_of(timedelta(days=1))
    certificate = (
        certificates.builder(certificates.subject("any"), end)
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .add_extension(names.value, critical=False)
        .add_extension(x509.BasicConstraints(False, None), critical=True)
        .sign(signer, SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    certificates.write(folder / "own.key", pem, 0o600)
    certificates.write(folder / "own.crt", certificate.public_bytes(Encoding.PEM), 0o644)
    return TlsFiles(operator.folder / certificates.CA_FILE, folder / "own.crt", folder / "own.key")


def names_of(operator: Authority) -> Any:
    """What a certificate of a worker says of it."""
    kind = x509.SubjectAlternativeName
    return leaf_of(files_of(operator, 0)).extensions.get_extension_for_class(kind)


@pytest.mark.parametrize("kind", KEYS)
def test_each_kind_of_key_is_verified(tmp_path: Path, operator: Authority, kind: str) -> None:
    files = files_with(tmp_path / "own", operator, KEYS[kind](), names_of(operator))
    signed, signature = WorkerSigner(files).sign(ROOT, TEXT)
    assert is_signed_by(signed.identity, signature, TEXT)
    assert not is_signed_by(signed.identity, signature, TEXT + b".")
    assert not is_signed_by(signed_by(files_of(operator, 1)).identity, signature, TEXT)
    WorkerSigner(files_of(operator, 1)).check_peer("client 0", signed, pins_of(files))


def test_a_key_that_signs_nothing_is_told(tmp_path: Path, operator: Authority) -> None:
    key = X25519PrivateKey.generate()
    files = files_with(tmp_path / "own", operator, key, names_of(operator))
    with pytest.raises(InvalidInputError, match="X25519PrivateKey signs nothing"):
        WorkerSigner(files).sign(ROOT, TEXT)
    assert not is_signed_by(signed_by(files).identity, b"", TEXT)


# ---- whose certificates count ----


def test_a_certificate_counts_that_is_of_a_worker_of_this_cluster_and_was_not_revoked(
    tmp_path: Path, operator: Authority
) -> None:
    signer, own = WorkerSigner(files_of(operator, 0)), files_of(operator, 1)
    signer.check_peer("client 1", signed_by(own), None)
    foreign = make_authority(tmp_path / "stranger").issue(Role.WORKER, "site-1")
    for one, said in (
        (signed_by(foreign), "client 1: no authority of this worker has issued"),
        (signed_by(operator.files("client-alice")), "its certificate is of client alice, and of"),
        (WorkerSigner().identity(ROOT), "client 1 has no certificate"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            signer.check_peer("client 1", one, None)
    add_revoked(tmp_path / "revoked", ["worker site-1"])
    signer = WorkerSigner(files_of(operator, 0), RevokedFile(tmp_path / "revoked"))
    signer.check_peer("client 2", signed_by(files_of(operator, 2)), None)
    with pytest.raises(UnauthenticatedError, match="worker site-1 has been revoked"):
        signer.check_peer("client 1", signed_by(own), None)


def test_a_site_believes_those_that_it_names_and_no_other_of_the_same_name(
    tmp_path: Path, operator: Authority
) -> None:
    signer, own = WorkerSigner(files_of(operator, 0)), files_of(operator, 1)
    pins = pins_of(own)
    signer.check_peer("client 1", signed_by(own), pins)
    with pytest.raises(InvalidInputError, match="client 2: its certificate is none of the conso"):
        signer.check_peer("client 2", signed_by(files_of(operator, 2)), pins)
    with (
        replaced(own, operator, "site-1"),
        pytest.raises(InvalidInputError, match="client 1: its certificate is none of the conso"),
    ):
        signer.check_peer("client 1", signed_by(own), pins)
    with pytest.raises(InvalidInputError, match="peers are pinned, and this worker has no certif"):
        WorkerSigner().check_peer("client 1", signed_by(own), pins)


def test_an_authority_of_the_consortium_is_believed(tmp_path: Path, operator: Authority) -> None:
    """Its workers are known to the cluster too; what the operator's own authority signs is not."""
    ours = make_authority(tmp_path / "ours")
    member = ours.issue(Role.WORKER, "site-8")
    both = tmp_path / "both.crt"
    both.write_bytes(b"".join(Path(a.folder / "ca.crt").read_bytes() for a in (operator, ours)))
    own = files_of(operator, 0)
    signer = WorkerSigner(TlsFiles(both, own.cert, own.key))
    ca = x509.load_pem_x509_certificate(Path(ours.folder / "ca.crt").read_bytes())
    pins = PeerPins(authorities=(ca.public_bytes(Encoding.DER),))
    signer.check_peer("client 8", signed_by(member), pins)
    with pytest.raises(InvalidInputError, match="client 1: its certificate is none of the conso"):
        signer.check_peer("client 1", signed_by(files_of(operator, 1)), pins)


# ---- rounds ----


def clients_of(operator: Authority, folder: Path | None = None) -> RoundOfClients:
    signers = {client: WorkerSigner(files_of(operator, client)) for client in ALL}
    workers = {client: worker(client, folder, signer) for client, signer in signers.items()}
    return RoundOfClients(workers, secure_job(len(ALL)))


def test_a_round_with_certificates_refuses_keys_that_the_coordinator_has_made(
    operator: Authority, tmp_path: Path
) -> None:
    clients = clients_of(operator)
    keys = clients.keys()
    stranger = make_authority(tmp_path / "stranger")
    minted = WorkerSigner(stranger.issue(Role.WORKER, "site-1"))
    liar = RoundOfClients({1: worker(1, None, minted)}, clients.job)
    forged = {**keys, **liar.keys()}
    told = clients.refusal(0, share_secrets=clients.share_step(0, forged))
    assert told == "refused_by_site: client 1: no authority of this worker has issued its " + (
        "certificate"
    )
    own = {**keys, 1: RoundOfClients({1: worker(1)}, clients.job).keys()[1]}
    told = clients.refusal(0, share_secrets=clients.share_step(0, own))
    assert told == "refused_by_site: client 1 has no certificate"
    assert clients.ask(0, share_secrets=clients.share_step(0, keys)).HasField("shares")


def test_a_certificate_that_is_renewed_in_mid_round_is_a_reason_to_begin_again(
    operator: Authority, tmp_path: Path
) -> None:
    clients = clients_of(operator, tmp_path)
    first = clients.keys()
    files = files_of(operator, 1)
    with replaced(files, operator, "site-1"):
        told = clients.refusal(1, post_keys=clients.post_step())
        assert told == (
            "keys_lost: the certificate of client 1's worker was renewed after it had posted keys "
            "of round 1, attempt 0"
        )
        clients.attempt = 1
        again = clients.keys()
        assert again[1].identity != first[1].identity
        clients.shares()
    restarted = clients_of(operator, tmp_path)
    restarted.attempt = 1
    assert "keys_lost" in restarted.refusal(1, post_keys=restarted.post_step())
    posted = restarted.ask(0, post_keys=restarted.post_step()).keys
    assert posted.share_key == again[0].share_key
    assert posted.identity == again[0].identity
