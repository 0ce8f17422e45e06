"""Provide the cell magic `%%stratagem task.py`, which turns notebook cells into modules that travel
with jobs. `%load_ext stratagem.client` registers it.

A cell becomes a file in a folder of this session, and is imported at once. A job that names a
function of such a file has that folder as its `code`, unless it names other code. Workers get the
text of the cells, never objects of the notebook.
"""

import atexit
import importlib
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Protocol

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.code.code_section import CodeSpec
from stratagem.common.job import JobSpec, entry_points
from stratagem.common.process.process import temporary_folder

MAGIC: Final = "stratagem"
_FILE: Final = re.compile(r"[A-Za-z_]\w*(/[A-Za-z_]\w*)*\.py")
_COMPILED: Final = "__pycache__"


class Shell(Protocol):
    """The part of the interface of IPython's shell that this module uses."""

    user_ns: dict[str, Any]

    def register_magic_function(
        self, func: Callable[[str, str], None], magic_kind: str, magic_name: str, /
    ) -> None: ...


class CellModules:
    """The modules that the notebook cells of one session have become."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def write(self, file: str, source: str) -> ModuleType:
        """Write a module and import it again, together with the session's modules that it imports.

        file: a name such as task.py or package/task.py. Raises the errors of the module's code.
        """
        if not _FILE.fullmatch(file):
            raise InvalidInputError.at("file", f"{file[:80]!r} is not a name such as task.py")
        folder = self._made()
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        # Their time stamps count seconds: a cell that is run twice in one would not be read again.
        for compiled in folder.rglob(_COMPILED):
            shutil.rmtree(compiled)
        for name, module in list(sys.modules.items()):
            if _is_below(module, folder):
                del sys.modules[name]
        importlib.invalidate_caches()
        return importlib.import_module(file.removesuffix(".py").replace("/", "."))

    def code_of(self, job: JobSpec) -> CodeSpec | None:
        """Return the code to send with a job: the job's own, or the folder of the cells if the job
        names a function in it."""
        folder = self._folder
        if job.code is not None or folder is None:
            return job.code
        modules = (name.partition(":")[0].replace(".", "/") for name in entry_points(job))
        is_used = any((folder / f"{module}.py").is_file() for module in modules)
        return CodeSpec(path=str(folder)) if is_used else None

    def _made(self) -> Path:
        if self._folder is None:
            folder = temporary_folder("notebook")
            atexit.register(folder.remove)
            self._folder = folder.path
            sys.path.insert(0, str(self._folder))
        return self._folder


cells: Final = CellModules()
"""The modules made from cells in this process."""


def register(shell: Shell) -> None:
    """Register the cell magic with an IPython shell."""

    def stratagem(line: str, cell: str) -> None:
        """Make a module of this cell: %%stratagem task.py"""
        module = cells.write(line.strip(), cell)
        head = module.__name__.partition(".")[0]
        shell.user_ns[head] = sys.modules[head]

    shell.register_magic_function(stratagem, "cell", MAGIC)


def _is_below(module: ModuleType, folder: Path) -> bool:
    # What stands in the module itself: some answer to every name, torch.classes among them.
    attributes = vars(module)
    places = [attributes.get("__file__"), *attributes.get("__path__", ())]
    return any(place and Path(place).is_relative_to(folder) for place in places)
