"""HOST:PORT and its parts."""

import socket

import pytest

from stratagem.common.base.host_port import dialled_host, is_loopback, split_address

pytestmark = pytest.mark.core


def test_an_address_is_a_host_and_a_port() -> None:
    assert split_address("head:7070") == ("head", 7070)
    assert split_address("[::1]:0") == ("[::1]", 0)


@pytest.mark.parametrize("text", ["", "head", ":7070", "head:", "head:x", "head:65536", "head:٣"])
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text!r} is not HOST:PORT$"):
        split_address(text)


def test_loopback_is_what_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ("localhost", "127.8.9.1", "::1", "[::1]")))
    assert not any(map(is_loopback, ("head", "0.0.0.0", "10.0.0.1", "[::]")))


def test_who_listens_on_every_address_is_dialled_by_name() -> None:
    own = socket.gethostname()
    assert [dialled_host(host) for host in ("0.0.0.0", "::", "[::]")] == [own] * 3
    assert [dialled_host(host) for host in ("head", "127.0.0.1")] == ["head", "127.0.0.1"]
