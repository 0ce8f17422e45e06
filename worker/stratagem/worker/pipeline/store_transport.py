"""Send messages of stages through an object store: a directory that all workers see, or S3.

An object is called <prefix>/<step>/<boundary, micro-batch, direction>, read by polling, and deleted
once it was read. `prefix` names run, party and membership, so that what a lost membership left
behind is never read; `ActivationStore` deletes it. Objects carry a CRC32C of their own.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import google_crc32c
import obstore
from obstore.exceptions import BaseError
from obstore.exceptions import NotFoundError as MissingObjectError
from obstore.store import from_url

from stratagem.common.base.errors import IntegrityError, InvalidInputError, UnavailableError
from stratagem.common.tensors.stream import RECEIVED, SENT, over
from stratagem.common.tensors.torch_codec import bytes_of
from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.pipeline.messages import Address, Message, pack, unpack

FIRST_POLL_S: Final = 0.001
LAST_POLL_S: Final = 0.05
NUM_WRITERS: Final = 2
_CRC_BYTES: Final = 4
_CUT: Final = "cut"


class StoreTransport:
    """Transport over a store that all ranks read and write.

    url: file:///a/directory or s3://bucket/folder. settings: further arguments of obstore, such as
    endpoint and credentials.
    """

    def __init__(self, url: str, prefix: str, settings: dict[str, Any] | None = None) -> None:
        self._store, self._prefix = open_store(url, settings or {}), prefix
        self._pool = ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="activations")
        self._puts: list[Future[Any]] = []
        self._is_cut = threading.Event()

    def begin(self, step: int, awaited: Iterable[Address]) -> None:
        return

    def send(self, address: Address, message: Message) -> None:
        frame = pack(address, message)
        over("store", SENT).num_bytes += frame.nbytes
        self._submit(self._put, address, bytes_of(frame))

    def recv(self, address: Address, timeout_s: float) -> Message:
        path = self._path(address)
        give_up_at, pause_s = time.monotonic() + timeout_s, FIRST_POLL_S
        while (stored := self._get(path)) is None:
            self._check_puts(address)
            if time.monotonic() > give_up_at:
                raise ExchangeError(f"receive of {address}: no {path} within {timeout_s:g} s")
            # The others' cut is looked for at the slow pace only: it is a request of its own.
            if self._is_cut.wait(pause_s) or (
                pause_s == LAST_POLL_S and self._get(f"{self._prefix}/{_CUT}") is not None
            ):
                raise ExchangeError(f"receive of {address}: the party was cut")
            pause_s = min(2 * pause_s, LAST_POLL_S)
        over("store", RECEIVED).num_bytes += len(stored)
        self._submit(obstore.delete, self._store, path)
        body = memoryview(stored)[:-_CRC_BYTES]
        if google_crc32c.value(bytes(body)) != int.from_bytes(stored[-_CRC_BYTES:], "little"):
            raise IntegrityError(f"{path}: the checksum is wrong")
        return unpack(address, memoryview(bytearray(body)))

    def end(self, timeout_s: float) -> None:
        puts, self._puts = self._puts, []
        for put in puts:
            self._result(put, "the end of a step", timeout_s)

    def cut(self) -> None:
        """Cut the transport; the other ranks notice an object with the name `cut`."""
        if not self._is_cut.is_set():
            self._is_cut.set()
            self._pool.submit(obstore.put, self._store, f"{self._prefix}/{_CUT}", b"")
            self._pool.shutdown(wait=False)

    def close(self) -> None:
        """Wait for unfinished writes, and end the threads that write."""
        self._pool.shutdown(wait=True)

    def _submit(self, act: Callable[..., Any], *arguments: Any) -> None:
        try:
            self._puts.append(self._pool.submit(act, *arguments))
        except RuntimeError as error:  # the pool has ended
            raise ExchangeError("the party was cut") from error

    def _path(self, address: Address) -> str:
        label = re.sub(r"[^A-Za-z0-9]+", "-", address.label)
        return f"{self._prefix}/{address.step}/{label}"

    def _put(self, address: Address, frame: memoryview) -> None:
        crc = google_crc32c.value(bytes(frame)).to_bytes(_CRC_BYTES, "little")
        obstore.put(self._store, self._path(address), [bytes(frame), crc])

    def _get(self, path: str) -> bytes | None:
        try:
            return bytes(obstore.get(self._store, path).bytes())
        except (MissingObjectError, FileNotFoundError):
            return None
        except BaseError as error:
            raise UnavailableError(f"object store: {path}: {error}") from error

    def _check_puts(self, address: Address) -> None:
        """Raise the error of a failed write, without which the other ranks would wait until their
        timeouts."""
        for put in [put for put in self._puts if put.done()]:
            self._puts.remove(put)
            self._result(put, str(address), 0.0)

    def _result(self, put: Future[Any], what: str, timeout_s: float) -> None:
        try:
            put.result(timeout_s)
        except TimeoutError as error:
            text = f"{what}: the object store did not answer within {timeout_s:g} s"
            raise ExchangeError(text) from error
        except (BaseError, OSError) as error:
            raise UnavailableError(f"{what}: the object store refuses: {error}") from error


def open_store(url: str, settings: dict[str, Any]) -> Any:
    """Open the store of a URL; a local directory is created if it is missing. settings: obstore's
    config (endpoint, region, keys), client_options and retry_config."""
    if not url.startswith(("file:///", "s3://")):
        raise InvalidInputError.at("data_store", f"{url!r} is neither file:///… nor s3://…")
    if url.startswith("file://"):
        Path(url.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
    try:
        return from_url(url, **settings)
    except BaseException as error:  # obstore panics, outside Exception, at an unknown setting
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise InvalidInputError.at("data_store", str(error)) from error
        raise
