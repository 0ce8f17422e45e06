"""Makes each change of the list in a copy of the project and says which of them no test sees.

`make mutants` runs the whole list, `ARGS="--area folds"` one area of it, and `ARGS="--count"` all
tests on each, to say how many see it. `ARGS="--propose 10 --area folds"` prints changes that the
list has not.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.mutants.areas import AREAS, area_of
from tests.mutants.proposals import Change, proposals
from tests.mutants.runs import LIST, listed, run
from tests.repository import ROOT


def proposed(area: str, num: int, known: set[Change]) -> Iterator[Change]:
    """Changes of an area that are not in the list, the same ones at each call."""
    folders = AREAS[area].folders
    files = sorted(
        str(path.relative_to(ROOT))
        for folder in folders
        for path in ([ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py"))
    )
    found = [
        each
        for file in files
        if area_of(file) == area
        for each in proposals(file, (ROOT / file).read_text())
    ]
    random.Random(area).shuffle(found)
    yield from [each for each in found if each not in known][:num]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--area", choices=AREAS, action="append")
    parser.add_argument("--count", action="store_true", help="run all tests on each change")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--propose", type=int, metavar="N", help="print N changes of each area")
    parser.add_argument("--list", type=Path, default=LIST)
    given = parser.parse_args()
    areas = given.area or list(AREAS)
    known = listed(given.list.read_text())
    if given.propose:
        for area in areas:
            for each in proposed(area, given.propose, {row.change for row in known}):
                print(json.dumps(asdict(each)))
        return 0
    chosen = [
        each for each in known if area_of(each.change.file) in areas and each.seen_by == "test"
    ]
    return int(run(chosen, given.processes, not given.count) > 0)


if __name__ == "__main__":
    sys.exit(main())
