"""Cells of a notebook as modules that travel with jobs."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import stratagem.client
from stratagem.client.sdk import cell_modules
from stratagem.client.sdk.code_folder import bundle_of
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.code.bundle import unpack
from stratagem.common.job import CodeSpec
from tests.jobs import job

USES_CELLS = {"entrypoint": "task:build", "kwargs": {}}


class Shell:
    """What IPython's shell is to an extension."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {}
        self.magics: dict[tuple[str, str], Callable[[str, str], None]] = {}

    def register_magic_function(
        self, func: Callable[[str, str], None], magic_kind: str, magic_name: str, /
    ) -> None:
        self.magics[magic_kind, magic_name] = func

    def cell(self, text: str) -> None:
        """Run a cell, as the shell does: the first line is the magic's, the rest is its cell."""
        first, _, rest = text.partition("\n")
        magic, _, line = first.removeprefix("%%").partition(" ")
        self.magics["cell", magic](line, rest)


class AnswersAll(ModuleType):
    """A module that has an answer to every name, as torch.classes has."""

    def __getattr__(self, name: str) -> object:
        return object()


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(cell_modules, "cells", cell_modules.CellModules())
    monkeypatch.setitem(sys.modules, "answers_all", AnswersAll("answers_all"))
    before = set(sys.modules)
    shell = Shell()
    stratagem.client.load_ipython_extension(shell)
    yield shell
    for name in {"task", "helper", "package", "package.inner"} & (set(sys.modules) - before):
        del sys.modules[name]


def test_a_cell_is_imported_and_travels_with_the_jobs_that_name_it(shell: Shell) -> None:
    own = CodeSpec(digest="0" * 64)  # type: ignore[arg-type]
    assert cell_modules.cells.code_of(job(USES_CELLS)) is None
    shell.cell("%%stratagem helper.py\nNAME = 'first'\n")
    shell.cell("%%stratagem task.py\nimport helper\ndef build(): return helper.NAME\n")
    assert shell.user_ns["task"].build() == "first"
    code = cell_modules.cells.code_of(job(USES_CELLS))
    assert code is not None
    before = bundle_of(code)
    assert set(unpack(before)) == {"helper.py", "task.py"}
    # Others need not be allowed on the workers to bring code along.
    assert cell_modules.cells.code_of(job("mlp")) is None
    assert cell_modules.cells.code_of(job(USES_CELLS, code=own.document())) == own

    shell.cell("%%stratagem helper.py\nNAME = 'other'\n")  # of the same size, at once
    shell.cell("%%stratagem task.py\nimport helper\ndef build(): return helper.NAME\n")
    assert shell.user_ns["task"].build() == "other"
    assert bundle_of(code) != before


def test_cells_may_make_packages_and_nothing_outside_of_their_folder(shell: Shell) -> None:
    shell.cell("%%stratagem package/inner.py\nVALUE = 3\n")
    assert shell.user_ns["package"].inner.VALUE == 3
    for wrong in ("", "task", "../task.py", "/tmp/task.py", "a b.py", "task.py more"):
        with pytest.raises(InvalidInputError, match="is not a name such as"):
            shell.cell(f"%%stratagem {wrong}\n")
    with pytest.raises(ZeroDivisionError):
        shell.cell("%%stratagem task.py\n1 / 0\n")


def test_the_folder_is_of_one_session(shell: Shell) -> None:
    shell.cell("%%stratagem task.py\ndef build(): ...\n")
    code = cell_modules.cells.code_of(job(USES_CELLS))
    assert code is not None
    assert code.path is not None
    assert not Path(code.path).is_relative_to(Path.cwd())
    assert cell_modules.CellModules().code_of(job(USES_CELLS)) is None
