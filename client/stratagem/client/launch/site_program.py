"""Programs by which a site takes jobs, such as sbatch and kubectl."""

import re
import subprocess
from collections.abc import Iterable
from shutil import which
from typing import Final

from stratagem.common.base.errors import InvalidInputError, UnavailableError

TIMEOUT_S: Final = 60.0


def check_options(options: Iterable[str], program: str) -> None:
    """Raise InvalidInputError for what is no option, before anything is handed over."""
    for option in options:
        if re.match(r"-\w|--\w", option) is None or "\n" in option:
            problem = f"{option!r} is no option of {program}; write --name=VALUE after --"
            raise InvalidInputError.at("options", problem)


def check_program(name: str, where: str) -> None:
    """Raise UnavailableError where a program of the site is missing, before it is needed.

    where: as of `answer_of`.
    """
    if which(name) is None:
        raise _missing(name, where)


def answer_of(command: list[str], where: str) -> str:
    """Return what a program of the site answers to a command.

    where: the place at which the program is found, for the error's text.
    Raises UnavailableError where the program is missing, silent, or refuses.
    """
    name = command[0]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise _missing(name, where) from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{name} has not answered in {TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise UnavailableError(f"{name}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def _missing(name: str, where: str) -> UnavailableError:
    return UnavailableError(f"there is no {name} here; run this {where}")
