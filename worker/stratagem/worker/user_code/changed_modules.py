"""Tells which of the users' modules have changed on disk since this process has imported them.

An imported module stays as it was for as long as its process lives, so a job runs text that stands
in no file any more. What a module's file was is kept when it is first seen here, right after the
import of an entry point; a file that was only touched has not changed.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_SEEN: Final = 4096
"""Modules that are looked after; further ones are not."""
_OURS: Final = "stratagem"
MAX_BYTES: Final = 4 * 1024 * 1024
"""Of a file that is compared."""


@dataclass(frozen=True, slots=True)
class _SeenFile:
    """What the file of a module was."""

    path: str
    stamp: tuple[int, int]
    """When it was changed, in nanoseconds, and its size."""
    digest: bytes


_seen: dict[str, _SeenFile] = {}
"""By name of the module. Used by one thread."""
_passed_over: dict[tuple[str, ...], set[str]] = {}
"""By places: names of modules that are in none of them. They are thousands, and each entry point of
each job looks for what is new."""


def see_modules(folders: Iterable[str | Path]) -> None:
    """Keep what the files are of those modules in these folders that are imported by now.

    Installed packages are left out, also where the folder has an environment in it: who installs
    another version starts the worker anew.
    """
    kinds = (Path(folder) for folder in folders)
    places = tuple(f"{each}/" for folder in kinds for each in {folder.absolute(), folder.resolve()})
    if not places:
        return
    passed_over = _passed_over.setdefault(places, set())
    for name in set(sys.modules).difference(passed_over, _seen):
        path = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
        # attributes are not asked for: some modules import others then
        if not isinstance(path, str) or not path.startswith(places) or _is_installed(name, path):
            passed_over.add(name)
        elif len(_seen) < MAX_SEEN and (found := _looked_at(path)) is not None:
            _seen[name] = found


def changed_modules() -> Iterator[tuple[str, str]]:
    """Yield the name and the path of each module whose file is another one now, or is gone."""
    for name, seen in sorted(_seen.items()):
        if _stamp(seen.path) == seen.stamp:
            continue
        now = _looked_at(seen.path)
        if now is None or now.digest != seen.digest:
            yield name, seen.path
        else:
            _seen[name] = now


def _is_installed(name: str, path: str) -> bool:
    own = name.partition(".")[0] == _OURS
    return own or "/site-packages/" in path or path.startswith(f"{sys.prefix}/")


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _looked_at(path: str) -> _SeenFile | None:
    stamp = _stamp(path)
    if stamp is None or stamp[1] > MAX_BYTES:
        return None
    try:
        return _SeenFile(path, stamp, hashlib.sha256(Path(path).read_bytes()).digest())
    except OSError:
        return None
