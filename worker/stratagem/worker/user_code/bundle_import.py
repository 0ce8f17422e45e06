"""Imports modules of code bundles, each bundle under a name of its own.

The modules of a bundle are `stratagem_code_<digest>.<module>`, so that two bundles may both have a
`model.py` in one process; nothing else sees them, and `sys.path` stays as it is. Each module of a
bundle has an `__import__` of its own, which looks in the bundle first, as a script looks in its
folder first. Importing this module installs the finder: processes that are started for user code,
which find by name what they are given, import it too. Knows nothing of jobs, and must not import
torch.
"""

import builtins
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

PREFIX: Final = "stratagem_code_"
FOLDER_VARIABLE: Final = "STRATAGEM_CODE_FOLDER"
"""Names, to this process and its children, the folder that holds the unpacked bundles."""
_ROOT_CHARS: Final = len(PREFIX) + 64
_homes: dict[tuple[str, str], bool] = {}


def root_of(digest: str) -> str:
    """The name below which the modules of a bundle stand."""
    return f"{PREFIX}{digest}"


def plain_name(name: str) -> str:
    """The name of a module as the bundle says it, without the bundle's own."""
    return name[_ROOT_CHARS + 1 :] if name.startswith(PREFIX) else name


def plain_path(filename: str) -> str:
    """The path of a file as the bundle says it, without the folder in which it is unpacked."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not filename.startswith(os.path.join(folder, "")):
        return filename
    _, *inside = Path(filename).relative_to(folder).parts  # behind the digest
    return "/".join(inside)


def has_module(digest: str, module_name: str) -> bool:
    """Return whether a module is looked for in the bundle: its first part is a module or a package
    there, or a folder without `__init__.py` that no installed package has the name of."""
    return _is_home(root_of(digest), module_name.partition(".")[0])


def import_module(digest: str, module_name: str) -> ModuleType:
    """Import a module of a bundle. Raises what it raises, and ModuleNotFoundError, with the names
    that the bundle knows."""
    try:
        return importlib.import_module(f"{root_of(digest)}.{module_name}")
    except ModuleNotFoundError as error:
        raise _in_its_words(error) from error.__cause__


def forget(digest: str) -> None:
    """Take the modules of a bundle away: what imports it next runs it anew."""
    root = root_of(digest)
    for key in [key for key in _homes if key[0] == root]:
        del _homes[key]
    for name in [name for name in list(sys.modules) if name.partition(".")[0] == root]:
        del sys.modules[name]


def _is_home(root: str, head: str) -> bool:
    known = _homes.get((root, head))
    if known is None:
        spec = find_spec(f"{root}.{head}")
        known = spec is not None and (spec.has_location or not _is_installed(head))
        _homes[root, head] = known
    return known


def _is_installed(head: str) -> bool:
    try:
        spec = find_spec(head)
    except ValueError:  # of a module that has no spec, such as __main__
        return True
    return spec is not None and spec.loader is not None and spec.origin is not None


def _importer(root: str) -> Callable[..., ModuleType]:
    """Return the `__import__` of the modules below a root."""

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
    """Runs a module with the `__import__` of its bundle; writes and reads no compiled files."""

    def exec_module(self, module: ModuleType) -> None:
        root = module.__name__.partition(".")[0]
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _importer(root)}
        super().exec_module(module)

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


class _Finder(MetaPathFinder):
    """Finds the modules of all bundles that are unpacked in the folder of this process."""

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
    """Install the finder, once; first, as Python's own would find modules below a bundle, too."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


install()
