"""Where in the job's code an error was raised, in words that no row can get into.

A place is told only of files that are those of a module of the job: of its bundle, or of a package
that an entry point of it names. A type is told only where its module has it under its name, else
its nearest base that has: code may make types, and files, with any name.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from stratagem.common.base.errors import leaves
from stratagem.worker.user_code import bundle_import

MAX_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class CodePlaces:
    """The job's code: the digest of its bundle, "" without one, and the packages it names."""

    bundle: str
    packages: frozenset[str]


def told_type(error: BaseException) -> str:
    """Return the name of an error's type, as UserCodeError says it."""
    for kind in type(leaves(error)[0]).__mro__:
        found: object = sys.modules.get(kind.__module__)
        for part in kind.__qualname__.split("."):
            found = getattr(found, part, None)
        name = f"{bundle_import.plain_name(kind.__module__)}.{kind.__qualname__}"
        if found is kind and len(name) <= MAX_CHARS:
            return name.removeprefix("builtins.")
    return "Exception"


def told_place(error: BaseException, places: CodePlaces) -> str:
    """Return "file.py, line 7" of the innermost frame in the job's code; "" where there is none."""
    trace: TracebackType | None = leaves(error)[0].__traceback__
    place = ""
    while trace is not None:
        file = _own_file(trace.tb_frame.f_code.co_filename, places)
        if file:
            place = f"{file}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _own_file(filename: str, places: CodePlaces) -> str:
    folder = os.environ.get(bundle_import.FOLDER_VARIABLE)
    if folder and places.bundle:
        root = Path(folder, places.bundle)
        if Path(filename).is_relative_to(root) and Path(filename).is_file():
            return bundle_import.plain_path(filename)[:MAX_CHARS]
    for package in places.packages:
        module = sys.modules.get(package)
        for home in _homes(module):
            if filename == home or (os.path.isdir(home) and _is_below(filename, home)):
                return os.path.relpath(filename, os.path.dirname(home))[:MAX_CHARS]
    return ""


def _homes(module: object) -> list[str]:
    """Return the file of a module that is no package, or the folders of one that is."""
    folders = getattr(module, "__path__", None)
    if folders is not None:
        return [str(folder) for folder in folders]
    file = getattr(module, "__file__", None)
    return [file] if file else []


def _is_below(filename: str, folder: str) -> bool:
    return Path(filename).is_relative_to(folder) and Path(filename).is_file()
