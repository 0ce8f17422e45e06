"""HTTP/2 by hand, for what no gRPC client does: half a message, a few bytes at a time, silence.

Knows just enough of RFC 9113 and RFC 7541 to open one call: headers without compression, and the
status where gRPC writes it as plain text.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_MAX_FRAME: Final = 2**14
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_STATUS: Final = re.compile(rb"grpc-status.(\d{1,2})", re.DOTALL)
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True)
class End:
    """How a call ended: by a status, or by the connection or the stream (None)."""

    code: grpc.StatusCode | None


class RawCall:
    """One call on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def open(self, path: str, **more: str) -> None:
        """Send the headers of the call."""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
            "stratagem-protocol": "1",
            **more,
        }
        self._frame(_HEADERS, _END_HEADERS, 1, b"".join(map(_literal, fields, fields.values())))

    def data(self, data: bytes, *, is_last: bool = False) -> None:
        """Send some bytes of the body; at most as many as a new connection lets through."""
        pieces = [data[at : at + _MAX_FRAME] for at in range(0, len(data), _MAX_FRAME)] or [b""]
        for piece in pieces[:-1]:
            self._frame(_DATA, 0, 1, piece)
        self._frame(_DATA, _END_STREAM if is_last else 0, 1, pieces[-1])

    def raw(self, data: bytes) -> None:
        """Send anything."""
        self._writer.write(data)

    async def end(self) -> End:
        """Wait until the other side ends the call."""
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
                if kind == _HEADERS and (found := _STATUS.search(payload)):
                    return End(_CODES[int(found[1])])
                if kind == _GOAWAY or (stream == 1 and kind == _RST):
                    return End(None)
                if kind == _SETTINGS and not flags & _ACK:
                    self._frame(_SETTINGS, _ACK, 0, b"")
                if kind == _PING and not flags & _ACK:
                    self._frame(_PING, _ACK, 0, payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            return End(None)

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
        self._writer.write(head + payload)


def message(data: bytes, *, announced: int | None = None, compressed: bool = False) -> bytes:
    """A gRPC message, whose length may be a lie."""
    size = len(data) if announced is None else announced
    return bytes((compressed,)) + size.to_bytes(4, "big") + data


@asynccontextmanager
async def raw_call(address: str, *, preface: bool = True) -> AsyncIterator[RawCall]:
    """A connection that has said hello."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    call = RawCall(reader, writer)
    if preface:
        call.raw(_PREFACE)
        call._frame(_SETTINGS, 0, 0, b"")
    try:
        yield call
    finally:
        writer.transport.abort()


def _literal(name: str, value: str) -> bytes:
    """A header field that is not indexed."""
    return b"\0" + _text(name) + _text(value)


def _text(value: str) -> bytes:
    raw = value.encode()
    return _integer(len(raw)) + raw


def _integer(value: int) -> bytes:
    if value < 127:
        return bytes((value,))
    out, value = bytearray((127,)), value - 127
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))
