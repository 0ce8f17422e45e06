"""Prints the base requirements of a pyproject.toml and those of the extras named: one per line.

So that an image's packages are a layer of their own, which a change of our code leaves as it is:
`python requirements.py pyproject.toml worker,examples`. Knows nothing of versions; constraints.txt
pins them.
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """In the order of the file. Raises SystemExit for an extra that it does not have."""
    project = tomllib.loads(pyproject.read_text())["project"]
    offered = project["optional-dependencies"]
    for extra in extras:
        if extra not in offered:
            raise SystemExit(f"extra {extra!r} is not one of {', '.join(offered)}")
    found = [*project["dependencies"], *(line for extra in extras for line in offered[extra])]
    nested = [line for line in found if line.startswith(f"{project['name']}[")]
    if nested:
        raise SystemExit(f"name the extras inside {nested[0]!r} themselves")
    return found


if __name__ == "__main__":
    _, path, *names = sys.argv
    print(*requirements(Path(path), [name for each in names for name in each.split(",")]), sep="\n")
