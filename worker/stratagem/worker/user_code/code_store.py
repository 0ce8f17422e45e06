"""The unpacked code bundles of one worker: folders named by their digests.

A folder is there whole or not at all, also after a kill; nobody may write into it; and before this
process first uses one that it has not unpacked itself, its files are packed again and compared with
the digest. Those that no run of this worker has are removed, the longest unused first, where all
together exceed a limit. Used in the torch thread.
"""

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stratagem.common.base.errors import IntegrityError, StratagemError
from stratagem.common.code.bundle import MAX_FILES, digest_of, pack, unpack
from stratagem.common.process.failpoints import failpoint
from stratagem.common.process.process import remove_tree, temporary_folder
from stratagem.worker.user_code import bundle_import

MAX_STORED_BYTES: Final = 2**30
_PART: Final = ".part-"


class CodeStore:
    """The bundles below a folder of this worker, which the process has to itself."""

    def __init__(self, folder: Path | None, max_bytes: int = MAX_STORED_BYTES) -> None:
        """Make the folder known to imports; remove what a process that was killed has left.

        folder: None for a temporary one, which `close` removes.
        """
        self._max_bytes = max_bytes
        self._temporary = temporary_folder("code") if folder is None else None
        self._folder = self._temporary.path if self._temporary is not None else Path(folder or "")
        self._users: dict[str, set[str]] = {}
        self._checked: set[str] = set()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.environ[bundle_import.FOLDER_VARIABLE] = str(self._folder.absolute())
        for path in self._folder.glob(f"{_PART}*"):
            remove_tree(path)

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.remove()

    def take(self, digest: str, run_id: str, fetch: Callable[[], bytes]) -> None:
        """Have a bundle here for a run, ready to be imported.

        fetch: gives the archive, where it is not here. Raises IntegrityError where that has another
        digest, InvalidInputError where it is no bundle.
        """
        self._users.setdefault(digest, set()).add(run_id)
        path = self._folder / digest
        if digest not in self._checked:
            if not _is_intact(path, digest):
                remove_tree(path)
                self._unpack(path, digest, fetch())
            self._checked.add(digest)
            self._make_room()
        os.utime(path)

    def drop_run(self, run_id: str) -> None:
        """A run has ended here: modules that no other run uses are forgotten, their files kept."""
        for digest, users in list(self._users.items()):
            users.discard(run_id)
            if not users:
                del self._users[digest]
                bundle_import.forget(digest)

    def _unpack(self, path: Path, digest: str, archive: bytes) -> None:
        found = digest_of(archive)
        if found != digest:
            raise IntegrityError(f"code.digest: the bundle {digest} has the digest {found}")
        files = unpack(archive)
        part = Path(tempfile.mkdtemp(prefix=_PART, dir=self._folder))
        for name, content in files.items():
            _write(part / name, content)
        folders = [part, *(Path(where) for where, _, _ in os.walk(part) if Path(where) != part)]
        for folder in reversed(folders):
            folder.chmod(0o555)
            _sync(folder)
        failpoint("worker.code.unpacked")
        part.rename(path)
        _sync(self._folder)

    def _make_room(self) -> None:
        """Remove what is unused longest until the rest fits; never what a run here has."""
        kept = [path for path in self._folder.iterdir() if not path.name.startswith(_PART)]
        sizes = {path: _size(path) for path in sorted(kept, key=lambda path: path.stat().st_mtime)}
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total <= self._max_bytes or path.name in self._users:
                continue
            self._checked.discard(path.name)
            remove_tree(path)
            total -= size


def _is_intact(path: Path, digest: str) -> bool:
    """Return whether a folder holds the files of the digest, and nothing else."""
    if not path.is_dir():
        return False
    try:
        return digest_of(pack(_read(path))) == digest
    except (OSError, StratagemError):
        return False


def _read(path: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for where, _, names in os.walk(path):
        for name in names:
            file = Path(where, name)
            if len(files) > MAX_FILES or not stat.S_ISREG(file.lstat().st_mode):
                raise IntegrityError(f"{file}: is not of the bundle")
            files[file.relative_to(path).as_posix()] = file.read_bytes()
    return files


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), 0o444)
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    return sum(
        Path(where, name).stat().st_size for where, _, names in os.walk(path) for name in names
    )
