"""Numbers, amounts of bytes and addresses as text."""

import socket

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.text import beyond_text, dialled_host, is_loopback, split_address
from stratagem.common.base.units import size_bytes

pytestmark = pytest.mark.core


def test_amounts_and_what_is_beyond_a_limit() -> None:
    said = {4.254: "4.25", 4.001174: "4.001", 4.000000000000001: "4.000000000000001", 3.994: "3.99"}
    assert {value: beyond_text(value, 4.0) for value in said} == said
    assert beyond_text(0.50000004, 0.5) == "0.50000004"
    sizes = {"8GB": 8 * 10**9, "512MiB": 512 << 20, "1.5k": 1500, "7": 7, "2 Ti": 2 << 40}
    assert {text: size_bytes(text, "memory") for text in sizes} == sizes
    for text in ("", "GB", "-1GB", "8 GBs", "0", "0.1B"):
        with pytest.raises(InvalidInputError, match="memory"):
            size_bytes(text, "memory")


def test_an_address_is_a_host_and_a_port_of_this_machine_or_another() -> None:
    assert split_address("head:7070") == ("head", 7070)
    assert split_address("[::1]:0") == ("[::1]", 0)
    for text in ("", "head", ":7070", "head:", "head:x", "head:65536", "head:٣"):
        with pytest.raises(ValueError, match=f"^{text!r} is not HOST:PORT$"):
            split_address(text)
    assert all(map(is_loopback, ("localhost", "127.8.9.1", "::1", "[::1]")))
    assert not any(map(is_loopback, ("head", "0.0.0.0", "10.0.0.1", "[::]")))
    own = socket.gethostname()
    assert [dialled_host(host) for host in ("0.0.0.0", "::", "[::]")] == [own] * 3
    assert [dialled_host(host) for host in ("head", "127.0.0.1")] == ["head", "127.0.0.1"]
