"""Import modules of code bundles, each bundle under a separate name, and store and admit bundles.

The modules of a bundle are `stratagem_code_<digest>.<module>`, so that two bundles may both have a
`model.py` in one process. Nothing else sees them, and `sys.path` does not change. Each module of a
bundle has a special `__import__`, which looks in the bundle first, as a script looks in its folder
first. Importing this module installs the finder. Processes started for user code resolve objects by
name, so they import it too. The module must not import torch.
"""

import builtins
import importlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

from stratagem.common.base.errors import IntegrityError, InvalidInputError, StratagemError
from stratagem.common.base.files import WatchedFiles, sync_folder
from stratagem.common.code.bundle import MAX_FILES, digest_of, pack, unpack
from stratagem.common.code.signatures import is_signed, read_public_keys
from stratagem.common.job import CodeSpec
from stratagem.common.process.failpoints import failpoint
from stratagem.common.process.process import remove_tree, temporary_folder

# ---- Import from bundles ----

PREFIX: Final = "stratagem_code_"
FOLDER_VARIABLE: Final = "STRATAGEM_CODE_FOLDER"
"""Environment variable with the folder of unpacked bundles, for this process and its children."""
_ROOT_CHARS: Final = len(PREFIX) + 64
_homes: dict[tuple[str, str], bool] = {}


def root_of(digest: str) -> str:
    """Return the name of the package that contains the modules of a bundle."""
    return f"{PREFIX}{digest}"


def plain_name(name: str) -> str:
    """Return a module's name inside its bundle; names of other modules are unchanged."""
    return name[_ROOT_CHARS + 1 :] if name.startswith(PREFIX) else name


def plain_path(filename: str) -> str:
    """Return a file's path relative to its bundle; other paths are unchanged."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not filename.startswith(os.path.join(folder, "")):
        return filename
    _, *inside = Path(filename).relative_to(folder).parts  # after the digest
    return "/".join(inside)


def has_module(digest: str, module_name: str) -> bool:
    """Return whether a module is imported from the bundle.

    That is so if the first part of its name is a module or package of the bundle, or a folder
    without `__init__.py` whose name no installed package has.
    """
    return _is_home(root_of(digest), module_name.partition(".")[0])


def import_module(digest: str, module_name: str) -> ModuleType:
    """Import a module of a bundle. Raises the errors of its code, and ModuleNotFoundError that
    lists the bundle's modules."""
    try:
        return importlib.import_module(f"{root_of(digest)}.{module_name}")
    except ModuleNotFoundError as error:
        raise _in_its_words(error) from error.__cause__


def forget(digest: str) -> None:
    """Remove a bundle's modules, so that the next import runs them again."""
    root = root_of(digest)
    for key in [key for key in _homes if key[0] == root]:
        del _homes[key]
    for name in [name for name in list(sys.modules) if name.partition(".")[0] == root]:
        del sys.modules[name]


def _is_home(root: str, head: str) -> bool:
    is_home = _homes.get((root, head))
    if is_home is None:
        spec = find_spec(f"{root}.{head}")
        is_home = spec is not None and (spec.has_location or not _is_installed(head))
        _homes[root, head] = is_home
    return is_home


def _is_installed(head: str) -> bool:
    try:
        spec = find_spec(head)
    except ValueError:  # raised for a module without a spec, such as __main__
        return True
    return spec is not None and spec.loader is not None and spec.origin is not None


def _importer(root: str) -> Callable[..., ModuleType]:
    """Return the `__import__` for the modules of a bundle."""

    def import_in_bundle(
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002  (as Python's own is called)
        locals: Mapping[str, object] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        head = name.partition(".")[0]
        try:
            if level or not _is_home(root, head):
                return builtins.__import__(name, globals, locals, fromlist or (), level)
            if fromlist:
                return builtins.__import__(f"{root}.{name}", globals, locals, fromlist, 0)
            importlib.import_module(f"{root}.{name}")
        except ModuleNotFoundError as error:
            raise _in_its_words(error) from error.__cause__
        return sys.modules[f"{root}.{head}"]

    return import_in_bundle


def _in_its_words(error: ModuleNotFoundError) -> ModuleNotFoundError:
    name = error.name or ""
    if not name.startswith(PREFIX):
        return error
    plain = plain_name(name)
    return ModuleNotFoundError(f"No module named {plain!r} in the job's code", name=plain)


class _Loader(SourceFileLoader):
    """Runs a module with its bundle's `__import__`, without compiled files."""

    def exec_module(self, module: ModuleType) -> None:
        root = module.__name__.partition(".")[0]
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _importer(root)}
        super().exec_module(module)

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


class _Finder(MetaPathFinder):
    """Finds modules of all bundles in this process's folder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        if path is None:
            return self._root(fullname)
        for folder in path:
            spec = FileFinder(folder, (_Loader, [".py"])).find_spec(fullname, target)
            if spec is not None:
                return spec
        return None

    def _root(self, name: str) -> ModuleSpec | None:
        parent = os.environ.get(FOLDER_VARIABLE)
        folder = Path(parent or "", name.removeprefix(PREFIX))
        if parent is None or "." in name or not folder.is_dir():
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


def install() -> None:
    """Install the finder once, before Python's, which would also find bundled modules."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


install()


# ---- Store of unpacked bundles ----
#
# Each bundle is a folder named by its digest. A folder is complete or missing, also after a kill,
# and nobody may write to it. Before this process first uses a folder that it has not unpacked
# itself, it packs the files again and compares the digest. Bundles without a run of this worker are
# removed, the longest unused first, where all together exceed a limit. Used in the torch thread.

MAX_STORED_BYTES: Final = 2**30
_PART: Final = ".part-"


class CodeStore:
    """The bundles in a folder of this worker, which no other process uses."""

    def __init__(self, folder: Path | None, max_bytes: int = MAX_STORED_BYTES) -> None:
        """Make the folder known to imports, and remove the remains of a killed process.

        folder: None for a temporary one, which `close` removes.
        """
        self._max_bytes = max_bytes
        self._temporary = temporary_folder("code") if folder is None else None
        self._folder = self._temporary.path if self._temporary is not None else Path(folder or "")
        self._users: dict[str, set[str]] = {}
        self._checked: set[str] = set()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.environ[FOLDER_VARIABLE] = str(self._folder.absolute())
        for path in self._folder.glob(f"{_PART}*"):
            remove_tree(path)

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.remove()

    def take(self, digest: str, run_id: str, fetch: Callable[[], bytes]) -> None:
        """Provide a bundle for a run, ready for import. fetch: returns a missing archive.

        Raises IntegrityError for a wrong digest, InvalidInputError if the archive is not a bundle.
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
        """Forget the modules that only this run used; their files are kept."""
        for digest, users in list(self._users.items()):
            users.discard(run_id)
            if not users:
                del self._users[digest]
                forget(digest)

    def _unpack(self, path: Path, digest: str, archive: bytes) -> None:
        actual = digest_of(archive)
        if actual != digest:
            raise IntegrityError(f"code.digest: the bundle {digest} has the digest {actual}")
        files = unpack(archive)
        part = Path(tempfile.mkdtemp(prefix=_PART, dir=self._folder))
        for name, content in files.items():
            _write(part / name, content)
        folders = [part, *(Path(where) for where, _, _ in os.walk(part) if Path(where) != part)]
        for folder in reversed(folders):
            folder.chmod(0o555)
            sync_folder(folder)
        failpoint("worker.code.unpacked")
        part.rename(path)
        sync_folder(self._folder)

    def _make_room(self) -> None:
        """Remove the least recently used bundles of no present run until the rest fits."""
        dirs = [path for path in self._folder.iterdir() if not path.name.startswith(_PART)]
        sizes = {path: _size(path) for path in sorted(dirs, key=lambda path: path.stat().st_mtime)}
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total <= self._max_bytes or path.name in self._users:
                continue
            self._checked.discard(path.name)
            remove_tree(path)
            total -= size


def _is_intact(path: Path, digest: str) -> bool:
    """Return whether a folder has exactly the files from which the digest was computed."""
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


def _size(path: Path) -> int:
    return sum(
        Path(where, name).stat().st_size for where, _, names in os.walk(path) for name in names
    )


# ---- Code policy of the operator ----
#
# The policy determines the code that may come to this worker with a job: `none` (code must be
# installed), `signed:FILE` (by one of the public keys of the file), `digests:FILE` (listed in the
# file) or `any`. The files are read again when they change. A job may name anything in a bundle
# that the policy admits: entry points in it need not be on the allow list.

Check = Callable[[CodeSpec], str]
"""Returns the reason why a bundle may not run; "" if it may."""
FORMS: Final = "none, signed:FILE, digests:FILE or any"


class CodePolicy:
    """The policy of `--allow-code`. Raises InvalidInputError for malformed text or unusable
    file."""

    def __init__(self, text: str = "none") -> None:
        self._text = text
        kind, _, file = text.partition(":")
        if (kind in ("signed", "digests")) != bool(file) or kind not in _CHECKS:
            raise InvalidInputError.at("--allow-code", f"{text!r} is not one of {FORMS}")
        try:
            self._check = _CHECKS[kind](Path(file))
        except InvalidInputError as error:
            raise InvalidInputError.at("--allow-code", str(error)) from None

    def admit(self, code: CodeSpec) -> None:
        """Raise InvalidInputError, with the policy and the remedy, unless the bundle may run."""
        reason = self._check(code)
        if reason:
            raise InvalidInputError.at("code", f"{reason} (--allow-code {self._text})")


def _none(_file: Path) -> Check:
    return lambda _: (
        "this worker takes no code from jobs: install the package on the workers and leave `code` "
        "out, or have their operator set --allow-code to signed:FILE, digests:FILE or any"
    )


def _any(_file: Path) -> Check:
    return lambda _: ""


def _signed(file: Path) -> Check:
    keys = WatchedFiles(
        [file], lambda: read_public_keys(file), unusable="keys of code cannot be used"
    )

    def check(code: CodeSpec) -> str:
        if code.signature is None:
            return (
                f"the bundle {code.digest} is not signed: `stratagem code sign` prints what "
                "belongs into code.signature"
            )
        if is_signed(code.digest or "", code.signature, keys.newest()):
            return ""
        return (
            f"code.signature is of another bundle than {code.digest}, or by a key that this worker "
            "does not trust: sign the files as they are now, with a key of its operator"
        )

    return check


def _digests(file: Path) -> Check:
    listed = WatchedFiles(
        [file], lambda: _read_digests(file), unusable="digests of code cannot be used"
    )

    def check(code: CodeSpec) -> str:
        if code.digest in listed.newest():
            return ""
        return f"the bundle {code.digest} is not among those that the operator has listed"

    return check


def _read_digests(file: Path) -> frozenset[str]:
    """Return the first word of each line, without comments (`#`)."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{file}: {error}") from None
    words = (line.partition("#")[0].split() for line in lines)
    return frozenset(first for first, *_ in filter(None, words))


_CHECKS: Final = {"none": _none, "signed": _signed, "digests": _digests, "any": _any}
