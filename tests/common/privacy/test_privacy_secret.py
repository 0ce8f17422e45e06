"""The secret of private runs: made once, kept by the operator, and never silently another one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.privacy.noise import (
    PrivacySecret,
    SecretLostError,
    fingerprint_of,
    seeded_secret,
)


def write(path: Path, secret: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(secret)
    path.chmod(mode)
    return path


def test_it_is_made_at_first_use_for_its_owner_alone_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "privacy-secret"
    secret = PrivacySecret(path, may_make=True)
    secret.check_usable()
    assert not path.exists()
    made = secret.get("")
    assert len(made) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert PrivacySecret(path, may_make=True).get(fingerprint_of(made)) == made
    assert made.hex() not in fingerprint_of(made)


def test_runs_that_begin_together_have_the_same(tmp_path: Path) -> None:
    secret = PrivacySecret(tmp_path / "privacy-secret", may_make=True)
    begin = threading.Barrier(8)

    def first_use() -> bytes:
        begin.wait()
        return secret.get("")

    with ThreadPoolExecutor(8) as pool:
        found = {future.result() for future in [pool.submit(first_use) for _ in range(8)]}
    assert found == {(tmp_path / "privacy-secret").read_bytes()}


def test_one_that_is_lost_is_not_made_again_under_a_run_that_has_used_it(tmp_path: Path) -> None:
    path = tmp_path / "privacy-secret"
    used = fingerprint_of(PrivacySecret(path, may_make=True).get(""))
    path.unlink()
    with pytest.raises(SecretLostError, match=r"is lost: .* is not there; put that file back"):
        PrivacySecret(path, may_make=True).get(used)
    assert not path.exists()
    write(path, bytes(32))
    with pytest.raises(SecretLostError, match=f"another one than the run's, {used}"):
        PrivacySecret(path, may_make=True).get(used)


def test_one_that_is_named_must_be_there_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    for found, text in (
        (None, "No such file"),
        ((b"short", 0o600), "has 5 bytes and must have 32 random ones"),
        ((bytes(32), 0o644), "has the mode 0644"),
    ):
        if found is not None:
            write(path, *found)
        with pytest.raises(InvalidInputError, match=text):
            PrivacySecret(path).check_usable()
    path.chmod(0o640)
    PrivacySecret(path).check_usable()
    assert PrivacySecret(path).get("") == bytes(32)
    # With a shared journal it must be named.
    with pytest.raises(InvalidInputError, match="start them with --privacy-secret FILE"):
        PrivacySecret(None).check_usable()
    assert seeded_secret(1) == seeded_secret(1) != seeded_secret(2)
