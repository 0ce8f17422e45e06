"""The table of calls: complete, and what it says for every kind of caller."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from stratagem.common.base.errors import (
    InvalidInputError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from stratagem.common.identity.callers import (
    HEADER,
    NOBODY,
    TABLE,
    Anyone,
    Authorizer,
    RevokedFile,
    Scope,
    TokenBook,
    add_revoked,
    add_token,
    current_caller,
    fingerprint,
    is_open,
    new_token,
)
from stratagem.common.identity.certificates import Authority
from stratagem.common.identity.tls import Role
from stratagem.v1 import coordinator_pb2, peer_pb2, worker_pb2
from tests.repository import ROOT

FILES = (coordinator_pb2, worker_pb2, peer_pb2, health_pb2, reflection_pb2)
SUBMIT = "/stratagem.v1.CoordinatorService/SubmitRun"

Proof = tuple[Mapping[str, list[bytes]], list[tuple[str, str]]]


def registered() -> Iterator[str]:
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}"


def test_every_call_has_an_entry_and_no_entry_is_too_many() -> None:
    newer = {"/grpc.health.v1.Health/List"}  # not in every version that we run with
    assert set(TABLE) - newer == set(registered()) - newer
    assert all(rule.who for rule in TABLE.values())


def test_channels_listeners_and_credentials_are_made_in_one_place_each() -> None:
    """Health is asked in plaintext, by a program that imports nothing else."""
    places = {
        r"aio\.(?:in)?secure_channel\(": {"channel.py"},
        r"grpc\.(?:in)?secure_channel\(": {"health_probe.py"},
        r"add_(?:in)?secure_port": {"server.py"},
        r"ssl_channel_credentials": {"tls.py"},
        r"ssl_server_credentials": {"tls.py"},
        r"aio\.server\(": {"server.py"},
    }
    roots = [ROOT / part for part in ("client", "common", "coordinator", "worker", "tools")]
    texts = {path: path.read_text() for root in roots for path in root.rglob("*.py")}
    for pattern, expected in places.items():
        found = {
            path.name
            for path, text in texts.items()
            if "/v1/" not in str(path) and re.search(pattern, text)
        }
        assert found == expected, pattern


def certificate(*uris: str) -> Proof:
    return {"x509_pem_cert": [b"..."], "peer_uri": [uri.encode() for uri in uris]}, []


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenBook, Mapping[str, Proof]]:
    path = tmp_path_factory.mktemp("tokens") / "tokens.json"
    shown: dict[str, Proof] = {}
    for scope in Scope:
        token, known = new_token(f"t-{scope}", [scope])
        add_token(path, known)
        shown[scope] = ({}, [(HEADER, f"Bearer {token}")])
    return TokenBook(path), shown


LADDER = (Scope.READ, Scope.SUBMIT, Scope.ADMIN)


@pytest.mark.parametrize("method", sorted(TABLE))
def test_each_caller_may_what_the_table_says(
    method: str, tokens: tuple[TokenBook, Mapping[str, Proof]]
) -> None:
    book, shown = tokens
    gate = Authorizer("stratagem", book)
    proofs = {role: certificate(f"spiffe://stratagem/role/{role}/x") for role in Role} | dict(shown)
    needed = TABLE[method].who
    if is_open(method):
        assert needed == (Anyone.ANYONE,)
        return
    for who, proof in proofs.items():
        scopes: tuple[Scope, ...] = LADDER if who == Role.CLIENT else ()
        if who in LADDER:
            scopes = LADDER[: LADDER.index(Scope(who)) + 1]
        if who in needed or set(scopes) & set(needed):
            gate.admit(method, *proof)
            name = f"token t-{who}" if who in LADDER else f"{who} x"
            assert current_caller().name == name
            continue
        with pytest.raises(PermissionDeniedError) as refused:
            gate.admit(method, *proof)
        sentence = str(refused.value)
        assert sentence.startswith(f"{method}: it is for the ")
        assert all(each in sentence for each in needed)
        assert f"t-{who}" in sentence or f"{who} x" in sentence
    with pytest.raises(UnauthenticatedError, match=f"{method}: .*neither a certificate nor"):
        gate.admit(method, {}, [])


def test_what_is_not_in_the_table_is_refused_to_everybody() -> None:
    alice = certificate("spiffe://stratagem/role/client/alice")
    for gate, proof in ((Authorizer("stratagem"), alice), (Authorizer(), ({}, []))):
        with pytest.raises(PermissionDeniedError, match="not in the table"):
            gate.admit("/stratagem.v1.CoordinatorService/Backdoor", *proof)


def test_proofs_that_prove_nothing(tokens: tuple[TokenBook, Mapping[str, Proof]]) -> None:
    gate = Authorizer("stratagem", tokens[0])
    for proof, said in (
        (certificate("spiffe://elsewhere/role/client/alice"), "is of 'elsewhere'"),
        (certificate(), "no URI at all"),
        (
            certificate("spiffe://stratagem/role/client/a", "spiffe://stratagem/role/worker/a"),
            "must have one URI",
        ),
        (({}, [(HEADER, "Bearer stratagem_guessed")]), "not known"),
        (({}, [(HEADER, "Basic YTpi")]), "not known"),
    ):
        with pytest.raises(UnauthenticatedError, match=f"{SUBMIT}: .*{said}.*the scope submit"):
            gate.admit(SUBMIT, *proof)
    # Without a book no token counts; a certificate is not looked at where there is no TLS.
    with pytest.raises(UnauthenticatedError, match="neither"):
        Authorizer("stratagem").admit(SUBMIT, *tokens[1][Scope.ADMIN])


def test_without_tls_everybody_may_and_a_token_still_counts(
    tokens: tuple[TokenBook, Mapping[str, Proof]],
) -> None:
    book, shown = tokens
    Authorizer().admit(SUBMIT, {}, [])
    assert current_caller() == NOBODY
    current_caller().must_own("r", "alice")
    current_caller().must_be_worker("w0")
    Authorizer(tokens=book).admit(SUBMIT, *shown[Scope.SUBMIT])
    assert current_caller().name == "token t-submit"
    with pytest.raises(PermissionDeniedError):
        Authorizer(tokens=book).admit(SUBMIT, *shown[Scope.READ])
    with pytest.raises(UnauthenticatedError):
        Authorizer(tokens=book).admit(SUBMIT, {}, [(HEADER, "Bearer stratagem_wrong")])


def test_a_revoked_certificate_is_refused_from_the_next_call_on(
    authority: Authority, tmp_path: Path
) -> None:
    path = tmp_path / "revoked"
    path.write_text("# nobody yet\n\n")
    gate = Authorizer("stratagem", revoked=RevokedFile(path))
    method = "/stratagem.v1.CoordinatorService/Heartbeat"

    def worker(name: str) -> Proof:
        pem = Path(authority.files(f"worker-{name}").cert or "").read_bytes()
        context, metadata = certificate(f"spiffe://stratagem/role/worker/{name}")
        return {**context, "x509_pem_cert": [pem]}, metadata

    def is_refused(name: str) -> bool:
        try:
            gate.admit(method, *worker(name))
        except UnauthenticatedError as error:
            return f"the certificate of worker {name} has been revoked" in str(error)
        return False

    assert not is_refused("w0")
    add_revoked(path, ["worker w0"])
    assert (is_refused("w0"), is_refused("w1")) == (True, False)
    add_revoked(path, [fingerprint(worker("w1")[0]["x509_pem_cert"][0])])
    assert (is_refused("w0"), is_refused("w1")) == (True, True)
    path.write_text("worker\n")  # damaged, or gone: the list stays as it was
    assert is_refused("w0")
    path.unlink()
    assert is_refused("w0")
    with pytest.raises(InvalidInputError, match=r"revoked_file: .*No such file"):
        RevokedFile(path)
    path.write_text("client alice # has left\nnobody at all\n")
    with pytest.raises(InvalidInputError, match=r"line 2: .nobody at all. is neither"):
        RevokedFile(path)


def test_names_and_owners_are_checked(tokens: tuple[TokenBook, Mapping[str, Proof]]) -> None:
    gate = Authorizer("stratagem", tokens[0])
    gate.admit(
        "/stratagem.v1.CoordinatorService/Heartbeat",
        *certificate("spiffe://stratagem/role/worker/w0"),
    )
    current_caller().must_be_worker("w0")
    with pytest.raises(PermissionDeniedError, match="worker w0 speaks for worker 'w1'"):
        current_caller().must_be_worker("w1")
    gate.admit(
        "/stratagem.v1.CoordinatorService/Heartbeat",
        *certificate("spiffe://stratagem/role/pool/gpu"),
    )
    current_caller().must_be_worker("c0ffee.gpu")
    for other in ("gpu", ".gpu", "a.b.gpu", "c0ffee.cpu", "xgpu", "c0ffee.gpu.x", ""):
        with pytest.raises(PermissionDeniedError, match=r"worker \*\.gpu speaks for worker"):
            current_caller().must_be_worker(other)
    gate.admit(SUBMIT, *tokens[1][Scope.SUBMIT])
    assert current_caller().owner.startswith("token t-submit#")
    current_caller().must_own("r", current_caller().owner)
    with pytest.raises(PermissionDeniedError, match="belongs to an earlier token t-submit; "):
        current_caller().must_own("r", "token t-submit")
    with pytest.raises(PermissionDeniedError, match="run r belongs to token x; token t-submit"):
        current_caller().must_own("r", "token x")
    with pytest.raises(PermissionDeniedError, match="no known owner"):
        current_caller().must_own("r", "")
    gate.admit(SUBMIT, *tokens[1][Scope.ADMIN])
    current_caller().must_own("r", "token x")
