"""A private key that everybody on a machine may read is no proof of anything."""

from pathlib import Path

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.identity.certificates import Authority
from stratagem.common.identity.tls_files import Role, TlsFiles
from stratagem.common.observe.scrape_guard import Guard


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o666, 0o602, 0o601, 0o777])
def test_a_key_that_everybody_may_read_is_refused(own_authority: Authority, mode: int) -> None:
    files = own_authority.files("worker-w0")
    key = Path(files.key or "")
    key.chmod(mode)
    with pytest.raises(InvalidInputError) as refused:
        files.read()
    assert refused.value.violations[0].field == "tls_key"
    assert f"{key} has the mode {mode:04o}: everybody" in str(refused.value)
    assert "chmod 600" in str(refused.value)
    assert "its group (640)" in str(refused.value)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440, 0o660])
def test_owner_and_group_may_read_it(own_authority: Authority, mode: int) -> None:
    """Kubernetes mounts secrets for the group of a pod: 0440 in our manifests."""
    files = own_authority.files("worker-w0")
    Path(files.key or "").chmod(mode)
    assert str(files.identity()) == "worker w0"


def test_so_it_is_with_the_keys_of_metrics_and_of_the_authority(own_authority: Authority) -> None:
    files: TlsFiles = own_authority.files("coordinator")
    cert, key = Path(files.cert or ""), Path(files.key or "")
    key.chmod(0o644)
    with pytest.raises(InvalidInputError, match=r"metrics_tls_key: .* has the mode 0644"):
        Guard(cert, key).ssl_context()
    (own_authority.folder / "ca.key").chmod(0o644)
    with pytest.raises(InvalidInputError, match=r"ca\.key has the mode 0644"):
        own_authority.issue(Role.WORKER, "w9")
