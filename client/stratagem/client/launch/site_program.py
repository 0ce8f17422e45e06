"""Programs by which a site takes jobs, such as sbatch and kubectl."""

import subprocess
from typing import Final

from stratagem.common.base.errors import UnavailableError

TIMEOUT_S: Final = 60.0


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
        raise UnavailableError(f"there is no {name} here; run this {where}") from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{name} has not answered in {TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise UnavailableError(f"{name}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()
