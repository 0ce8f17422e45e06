"""Writes down each message of gRPC that this process sends or gets as a client, as bytes.

Loaded by a `sitecustomize` of the processes that are recorded (`record_messages.py`), of whichever
version they are: so it knows gRPC and nothing of ours. A line of JSON for each message, in a file
for each process.
"""

import base64
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from grpc.aio import _channel

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_numbers = itertools.count()


def tap(folder: Path) -> None:
    """Record the calls of all channels that this process, and its forks, will open."""
    channel: Any = _channel.Channel
    begin = channel.__init__

    def opened(self: Any, target: str, *args: Any, **kwargs: Any) -> None:
        self.recorded_target = target
        begin(self, target, *args, **kwargs)

    channel.__init__ = opened
    for kind in KINDS:
        setattr(channel, kind, _recording(getattr(channel, kind), kind, folder))


class _Notes:
    """The messages of one call."""

    def __init__(self, folder: Path, target: str, method: str) -> None:
        self._folder = folder
        self._known = {"call": f"{os.getpid()}-{next(_numbers)}", "to": target, "method": method}
        self._known |= {"by": " ".join(sys.argv), "begun_s": f"{time.time():.6f}"}

    def add(self, direction: str, content: bytes) -> None:
        told = self._known | {"direction": direction, "at_s": f"{time.time():.6f}"}
        told["content"] = base64.b64encode(content).decode()
        with (self._folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(told) + "\n")


class _Written:
    """A call as gRPC has it, whose stream of requests is written down: serialized or not before."""

    def __init__(self, inner: Any, notes: _Notes) -> None:
        self._inner, self._notes = inner, notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def send_serialized_message(self, content: bytes) -> None:
        self._notes.add("request", bytes(content))
        await self._inner.send_serialized_message(content)


def _recording(make: Any, kind: str, folder: Path) -> Any:
    """The method of a channel that makes callables of this kind, with its calls written down."""

    def recording(
        channel: Any,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        **kwargs: Any,
    ) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            notes = _Notes(folder, channel.recorded_target, method)

            def written(message: Any) -> bytes:
                content = message if request_serializer is None else request_serializer(message)
                if kind.startswith("unary"):
                    notes.add("request", bytes(content))
                return bytes(content)

            def got(content: bytes) -> Any:
                notes.add("response", bytes(content))
                return content if response_deserializer is None else response_deserializer(content)

            made = make(channel, method, written, got, **kwargs)(*args, **options)
            if kind.startswith("stream"):
                made._cython_call = _Written(made._cython_call, notes)
            return made

        return call

    return recording
