"""Authorities: how long they last, what they may sign, how one takes the place of another, and what
is said when one is over."""

import asyncio
import re
import shutil
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from structlog.testing import capture_logs
from typer.testing import CliRunner

from stratagem.client.cli.main import assemble
from stratagem.common.base.errors import InvalidInputError, WrongStateError
from stratagem.common.identity import certificates as authorities
from stratagem.common.identity.certificates import Authority, init, issue, make_authority, show
from stratagem.common.identity.tls import FreshFiles, Role, TlsFiles
from stratagem.common.observe import findings
from stratagem.common.observe.findings import environment_of
from stratagem.common.observe.metrics_server import EXPIRY, START, expiries
from stratagem.common.rpc.channel import Proof
from stratagem.common.rpc.probe import explain
from tests.identity.rig import expire, refused, serving, who_am_i
from tests.settings import coordinator_settings

HOSTS = ("127.0.0.1",)


def days_left(path: Path) -> float:
    return (show(path)[0].expires - datetime.now(UTC)) / timedelta(days=1)


def invoke(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(assemble(), ["certs", *arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


# ---- how long ----


def test_nothing_outlives_its_authority(tmp_path: Path) -> None:
    authority = make_authority(tmp_path, valid=timedelta(days=50))
    authority.issue(Role.CLIENT, "alice")
    ends = show(tmp_path / "ca.crt")[0].expires
    assert show(tmp_path / "client-alice.crt")[0].expires == ends
    before = (tmp_path / "client-alice.crt").read_bytes()
    with pytest.raises(InvalidInputError) as caught:
        issue(tmp_path, workers=[], clients=[], renew=True, days=60)
    said = str(caught.value)
    assert said.startswith("days: until 2")
    assert f"which is until {ends:%Y-%m-%d %H:%M} UTC; ask for 49 days at most" in said
    assert "certs renew-authority" in said
    assert (tmp_path / "client-alice.crt").read_bytes() == before
    with pytest.raises(InvalidInputError, match="days: 4000 is more than the 3650 for which"):
        init(tmp_path / "other", workers=[], clients=[], hosts=[], days=4000)
    assert not (tmp_path / "other").exists()


def test_an_authority_that_is_over_signs_nothing(own_authority: Authority) -> None:
    expire(own_authority)
    with pytest.raises(InvalidInputError, match=r"has expired at 2.* and can sign nothing; "):
        issue(own_authority.folder, workers=[], clients=["bob"])
    assert not (own_authority.folder / "client-bob.crt").exists()


# ---- one takes the place of another ----


async def test_one_authority_takes_the_place_of_another_without_a_gap(
    own_authority: Authority, tmp_path: Path
) -> None:
    folder, old = own_authority.folder, tmp_path / "old"
    old.mkdir()
    for path in folder.iterdir():
        shutil.copy(path, old / path.name)  # with its mode
    files, before = own_authority.files("coordinator"), Authority(old)
    async with serving(files) as ports:
        at = ports.certificates

        async def enters(authority: Authority) -> bool:
            return await who_am_i(at, Proof(authority.files("client-alice"))) == "client alice"

        assert await enters(before)
        shown = invoke("renew-authority", str(folder))
        assert shown.count("ca.crt: authority, until 2") == 2
        shown = invoke("show", str(folder / "ca.crt"))  # they have one name
        prints = re.findall(r"(?m)^ +(sha256:\w+)$", shown)
        assert prints == [each.fingerprint for each in show(folder / "ca.crt")]
        assert len({*prints}) == 2
        # Everybody has the file with both; the server's certificate is of the old one yet.
        assert await enters(own_authority)
        assert await enters(before)
        # A client's is of the new one, the server's is not; then both are.
        issue(folder, workers=[], clients=["alice"], renew=True)
        assert await enters(own_authority)
        assert await enters(before)
        issue(folder, workers=[], clients=[], renew=True)
        assert await enters(own_authority)
        # Who has got the new files trusts both, and is trusted with the old certificate.
        (old / "ca.crt").write_bytes((folder / "ca.crt").read_bytes())
        assert await enters(before)
        invoke("retire-authority", str(folder))
        assert await enters(own_authority)
        proof = Proof(before.files("client-alice"))
        assert (await refused(at, proof))[0] is grpc.StatusCode.UNAVAILABLE
        said = await asyncio.to_thread(explain, at, proof)
        assert said.startswith(f"{at} does not accept the certificate {old / 'client-alice.crt'}")


def test_an_authority_retires_when_nothing_in_the_folder_is_its_own(
    own_authority: Authority, tmp_path: Path
) -> None:
    folder = own_authority.folder
    alone = invoke("retire-authority", str(folder), exit_code=1)
    assert "holds one authority; there is none to retire" in " ".join(alone.split())
    authorities.renew(folder, timedelta(days=10))
    with pytest.raises(WrongStateError, match="holds two authorities already"):
        authorities.renew(folder, timedelta(days=10))
    issue(folder, workers=["w0"], clients=[], renew=True)
    said = " ".join(invoke("retire-authority", str(folder), exit_code=1).split())
    assert "has not signed client-alice.crt, coordinator.crt: `stratagem certs issue" in said
    assert len(show(folder / "ca.crt")) == 2
    issue(folder, workers=[], clients=[], renew=True)
    invoke("retire-authority", str(folder))
    assert len(show(folder / "ca.crt")) == 1
    assert own_authority.files("worker-w0").read().problem == ""
    assert len(own_authority.files("worker-w0").read().chain) == 2
    for command in ("renew-authority", "retire-authority"):
        assert "was not made by" in invoke(command, str(tmp_path), exit_code=1)


def test_a_crash_between_the_two_files_leaves_an_authority_that_signs(
    own_authority: Authority,
) -> None:
    folder = own_authority.folder
    key = (folder / "ca.key").read_bytes()
    authorities.renew(folder, timedelta(days=10))
    (folder / "ca.key").write_bytes(key)  # as it was before
    own_authority.issue(Role.CLIENT, "bob")
    assert len(own_authority.files("client-bob").read().chain) == 2
    invoke("retire-authority", str(folder))
    assert days_left(folder / "ca.crt") > 3000
    invoke("renew-authority", str(folder))


# ---- what is said when one is over ----


async def test_an_authority_that_is_over_is_named_with_its_file_and_date(
    own_authority: Authority,
) -> None:
    folder, alice = own_authority.folder, Proof(own_authority.files("client-alice"))
    async with serving(own_authority.files("coordinator")) as ports:
        assert await asyncio.to_thread(explain, ports.certificates, alice) == ""
    expire(own_authority)
    when = f"{show(folder / 'ca.crt')[0].expires:%Y-%m-%d %H:%M} UTC"
    name = f"the authority 'CN=stratagem development authority' in {folder / 'ca.crt'}"
    over = f"has expired at {when}; renew it and what it has signed: `stratagem certs renew-auth"
    with capture_logs() as lines:
        async with serving(own_authority.files("coordinator")) as ports:
            at = ports.certificates
            assert (await refused(at, alice))[0] is grpc.StatusCode.UNAVAILABLE
            said = await asyncio.to_thread(explain, at, alice)
            assert said.startswith(f"{name}, which has signed the certificate of {at}, {over}")
    # The server has said so when it started, before anybody came.
    warned = [line for line in lines if "certificate has expired" in line["event"]]
    own = folder / "coordinator.crt"
    assert warned[0]["reason"].startswith(f"{name}, which has signed the certificate {own}, {over}")


async def test_an_old_client_is_told_that_its_own_authority_is_over(
    own_authority: Authority, authority: Authority, tmp_path: Path
) -> None:
    """It trusts the server's, and its own certificate has years to go."""
    expire(own_authority)
    ca = tmp_path / "both.crt"
    ca.write_bytes(
        (authority.folder / "ca.crt").read_bytes() + (own_authority.folder / "ca.crt").read_bytes()
    )
    theirs, mine = authority.files("coordinator"), own_authority.files("client-alice")
    async with serving(TlsFiles(ca, theirs.cert, theirs.key)) as ports:
        proof = Proof(TlsFiles(ca, mine.cert, mine.key))
        assert (await refused(ports.certificates, proof))[0] is grpc.StatusCode.UNAVAILABLE
        said = await asyncio.to_thread(explain, ports.certificates, proof)
    assert said.startswith(f"the authority 'CN=stratagem development authority' in {ca}, which has")
    assert f"signed the certificate {mine.cert}, has expired at 2" in said


def test_a_certificate_beside_two_authorities_counts_as_long_as_its_own(
    own_authority: Authority,
) -> None:
    """Nothing is over for it because the other one is."""
    folder = own_authority.folder
    expire(own_authority)
    authorities.renew(folder, timedelta(days=100))
    old = own_authority.files("client-alice").read()
    assert "has expired" in old.problem
    own_authority.issue(Role.CLIENT, "alice", renew=True)
    new = own_authority.files("client-alice").read()
    assert new.problem == ""
    assert new.expires is not None
    assert len(show(folder / "ca.crt")) == 2


def test_the_doctor_names_what_ends_first(own_authority: Authority) -> None:
    files = own_authority.files("worker-w0")

    def found(now_s: float) -> findings.Finding:
        (each,) = findings.certificate("w0", environment_of(None, tls=files), now_s)
        return each

    now_s = time.time()
    assert found(now_s).level is findings.Level.OK
    assert found(now_s).found == "worker w0, expires in 90 days"
    expire(own_authority)
    over = found(now_s)
    assert over.level is findings.Level.FAIL
    path = own_authority.folder / "ca.crt"
    name = f"worker w0 by the authority 'CN=stratagem development authority' in {path}"
    assert over.found == f"{name}, has expired at {show(path)[0].expires:%Y-%m-%d %H:%M} UTC"
    assert "then what it has signed" in over.advice


def test_metrics_tell_when_each_certificate_begins_and_ends(
    own_authority: Authority, tmp_path: Path
) -> None:
    files = own_authority.files("coordinator")
    other = make_authority(tmp_path / "other").issue(Role.COORDINATOR, "x", HOSTS, timedelta(1))
    settings = coordinator_settings(
        tls_ca=files.ca,
        tls_cert=files.cert,
        tls_key=files.key,
        metrics_tls_cert=other.cert,
        metrics_tls_key=other.key,
    )
    told: dict[object, Mapping[tuple[str, ...], Any]] = dict(expiries(settings))
    now_s = time.time()
    days = {role: (ends - now_s) / 86_400 for (role,), ends in told[EXPIRY].items()}
    assert days == pytest.approx({"coordinator": 90, "authority": 3650, "metrics": 1}, abs=0.1)
    assert set(told[START]) == set(told[EXPIRY])
    assert all(begins < now_s for begins in told[START].values())
    assert not any(values for _, values in expiries(coordinator_settings()))
    Path(files.cert or "").write_text("being written")
    assert set(dict(expiries(settings))[EXPIRY]) == {("metrics",)}


def test_two_certificates_in_one_file_are_a_chain(own_authority: Authority) -> None:
    """As of an authority that signs by another one."""
    files = own_authority.files("worker-w0")
    with Path(files.cert or "").open("ab") as file:
        file.write((own_authority.folder / "ca.crt").read_bytes())
    chain = files.read().chain
    assert [link.is_authority for link in chain] == [False, True]
    assert FreshFiles(files).material.problem == ""
    assert len(x509.load_pem_x509_certificates(Path(files.cert or "").read_bytes())) == 2
