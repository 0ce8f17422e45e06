"""The operator's object store for activations: a folder of messages per membership, and its
deletion.

    <url>/<run>/<party>/<membership>/<replica>/...

Messages are deleted as they are read; what a lost membership left behind is deleted when the next
one is formed, and everything of a run when it is closed. Sweeping happens in threads of its own:
a slow store holds up no step, and one that fails is named in the log.
"""

import contextvars
import importlib
import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from stratagem.common.base.errors import InvalidInputError, NotFoundError, UnavailableError

if TYPE_CHECKING:  # needs obstore, which workers without a store need not have
    from stratagem.worker.pipeline.store_transport import StoreTransport

log = structlog.get_logger(__name__)

RETRY: Final = {"max_retries": 10, "retry_timeout": timedelta(seconds=30)}
"""Retry options for S3. A longer outage ends the party's membership; the next one tries again."""
_ROOT: Final = "root"


class ActivationStore:
    """The object store through which stages may send activations.

    Used in the torch thread, and by a thread that forms a party, but never by two threads at once.
    url: file:///DIR, s3://BUCKET/PREFIX (endpoint and keys from the AWS_* variables of the
    environment), or "" for none.
    """

    def __init__(self, url: str) -> None:
        """Open the store. Raises InvalidInputError if the client library is not installed."""
        self._url = url
        if url:
            try:
                importlib.import_module("obstore")
            except ImportError as error:
                message = "needs the object store library: pip install 'stratagem[s3]'"
                raise InvalidInputError.at("activation_store", message) from error
        # A directory per step would be left behind by every step.
        is_folder = url.startswith("file:")
        self._settings = {"automatic_cleanup": True} if is_folder else {"retry_config": RETRY}
        self._opened: dict[str, list[StoreTransport]] = {}

    @property
    def name(self) -> str:
        """The kind of store: "file" or "s3"."""
        return self._url.partition(":")[0]

    def check(self, worker_id: str) -> None:
        """Check that the store works. Raises NotFoundError if there is none, InvalidInputError if
        it cannot be used, and UnavailableError if it does not answer."""
        if not self._url:
            raise NotFoundError(
                f"worker {worker_id} has no object store, which ModelParallel over DataStore "
                "needs; start it with --activation-store"
            )
        path = f"check/{worker_id}"
        try:
            store = self._open()
            store.put(path, b"")
            store.delete(path)
        except InvalidInputError:
            raise
        except Exception as error:
            text = f"{self._url}: {str(error).partition(chr(10))[0]}"
            # What S3 has not refused, it has not answered.
            if self.name == "s3" and type(error).__name__ == "GenericError":
                raise UnavailableError(text) from error
            raise InvalidInputError.at("activation_store", text) from error

    def transport(self, run_id: str, party: str, membership: int, replica: int) -> "StoreTransport":
        """Return the transport of one replica of a party under one membership."""
        prefix = f"{_folder(run_id, party)}/{membership}/{replica}"
        from stratagem.worker.pipeline.store_transport import StoreTransport

        made = StoreTransport(self._url, prefix, self._settings)
        self._opened.setdefault(run_id, []).append(made)
        return made

    def clear_older(self, run_id: str, party: str, membership: int) -> None:
        """Delete the messages that earlier memberships of the party have left behind."""
        folder = _folder(run_id, party)

        def is_older(path: str) -> bool:
            number = path.removeprefix(f"{folder}/").partition("/")[0]
            return number.isdecimal() and int(number) < membership

        self._in_background(lambda: self._delete(f"{folder}/", is_older))

    def clear_run(self, run_id: str) -> None:
        """Delete all messages of a run for which this worker has used the store."""
        transports = self._opened.pop(run_id, [])

        def clear() -> None:
            for transport in transports:
                transport.close()
            self._delete(f"{run_id}/", lambda _: True)
            if self._url.startswith("file://"):
                # What a killed worker was writing is no object yet: no listing names it.
                folder = Path(self._url.removeprefix("file://"), run_id)
                shutil.rmtree(folder, ignore_errors=True)

        if transports:
            self._in_background(clear)

    def _delete(self, prefix: str, is_one: Callable[[str], bool]) -> None:
        store = self._open()
        for page in store.list(prefix):
            for path in [str(entry["path"]) for entry in page]:
                if is_one(path):
                    _delete_if_there(store, path)

    def _open(self) -> Any:
        from stratagem.worker.pipeline.store_transport import open_store

        return open_store(self._url, self._settings)

    def _in_background(self, act: Callable[[], None]) -> None:
        def run() -> None:
            try:
                act()
            except Exception as error:
                log.warning("activations are left in the store", url=self._url, reason=str(error))

        here = contextvars.copy_context()  # what the log lines are about
        threading.Thread(
            target=here.run, args=(run,), name="activations-sweep", daemon=True
        ).start()


def _delete_if_there(store: Any, path: str) -> None:
    from obstore.exceptions import NotFoundError as GoneError

    try:
        store.delete(path)
    except (FileNotFoundError, GoneError):
        return  # another worker sweeps too


def _folder(run_id: str, party: str) -> str:
    """Return the folder of a party: flat, so that no party's folder is inside that of another
    party."""
    return f"{run_id}/{party.replace('/', '.') or _ROOT}"
