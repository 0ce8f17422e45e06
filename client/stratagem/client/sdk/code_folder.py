"""Bundle the user's folder as the code that travels with a job.

Dot files, `__pycache__`, files that a .gitignore ignores, and everything but plain files are left
out. The format of a bundle is defined in common/code.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from pathspec import GitIgnoreSpec

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.code.bundle import check_names, check_size, pack
from stratagem.common.job import CodeSpec

_IGNORE_FILE: Final = ".gitignore"
_LEFT_OUT: Final = "__pycache__"


def bundle_of(code: CodeSpec) -> bytes:
    """Pack the folder that `code` names, relative to the current folder, as a bundle.

    Raises InvalidInputError for a folder that does not exist or holds no code, and LimitError,
    which names the largest files, before any file is read.
    """
    folder = Path(code.path or ".").absolute()
    if not folder.is_dir():
        raise InvalidInputError.at("code.path", f"{folder} is not a folder")
    chosen = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    if code.include is not None:
        included = _patterns("code.include", code.include)
        chosen = {name: path for name, path in chosen.items() if included.match_file(name)}
    if code.exclude is not None:
        excluded = _patterns("code.exclude", code.exclude)
        chosen = {name: path for name, path in chosen.items() if not excluded.match_file(name)}
    if not chosen:
        raise InvalidInputError.at("code", f"{folder} has no file that can travel with the job")
    try:
        check_names(chosen)
        check_size({name: path.stat().st_size for name, path in chosen.items()})
        return pack({name: path.read_bytes() for name, path in chosen.items()})
    except OSError as error:
        raise InvalidInputError.at("code", f"{error.filename}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class _Ignored:
    """The rules of one .gitignore file, which apply to paths below its folder."""

    folder: Path
    rules: GitIgnoreSpec

    def verdict(self, path: Path, *, is_folder: bool) -> bool | None:
        """Return whether the rules ignore the path; None if no rule matches it."""
        name = path.relative_to(self.folder).as_posix()
        return self.rules.check_file(f"{name}/" if is_folder else name).include


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that belong in the bundle, including links to files."""
    above = list(_rules_above(folder))
    return _walk(folder, above)


def _walk(folder: Path, rules: Sequence[_Ignored]) -> Iterator[Path]:
    rules = [*rules, *_rules_of(folder)]
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise InvalidInputError.at("code", f"{folder}: {error.strerror}") from None
    for entry in entries:
        path, is_folder = Path(entry.path), entry.is_dir(follow_symlinks=False)
        if entry.name.startswith(".") or entry.name == _LEFT_OUT:
            continue
        if not is_folder and not entry.is_file():
            continue  # a socket, a link to a folder or to nothing
        if _is_ignored(path, rules, is_folder=is_folder):
            continue
        if is_folder:
            yield from _walk(path, rules)
        else:
            yield path


def _is_ignored(path: Path, rules: Sequence[_Ignored], *, is_folder: bool) -> bool:
    """Return whether the rules ignore a path; the nearest .gitignore wins, as in git."""
    verdicts = (rule.verdict(path, is_folder=is_folder) for rule in reversed(rules))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def _rules_above(folder: Path) -> Iterator[_Ignored]:
    """Yield the .gitignore rules of all folders above this one, from the top of its git repository
    down; none outside of a repository."""
    above = list(folder.parents)
    for depth, top in enumerate(chain([folder], above)):
        if (top / ".git").exists():
            for between in reversed(above[:depth]):
                yield from _rules_of(between)
            return


def _rules_of(folder: Path) -> Iterator[_Ignored]:
    file = folder / _IGNORE_FILE
    if file.is_file():
        try:
            lines = file.read_text(errors="surrogateescape").splitlines()
        except OSError as error:
            raise InvalidInputError.at("code", f"{file}: {error.strerror}") from None
        yield _Ignored(folder, GitIgnoreSpec.from_lines(lines))


def _patterns(field: str, patterns: Sequence[str]) -> GitIgnoreSpec:
    try:
        return GitIgnoreSpec.from_lines(patterns)
    except ValueError as error:
        raise InvalidInputError.at(field, str(error)) from None
