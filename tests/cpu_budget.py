"""Holds `make test` to a budget of CPU seconds: `make budget`, which prints them by folder.

`cpu_budget.json` says what each folder took on the machine where it was recorded, and how fast that
machine was. More than that, or a test of more than two seconds that is not listed with its reason,
fails. `ARGS=--write` records what was measured: to lower a budget, and to raise one on purpose.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.cpu_seconds import COLLECTION

BUDGET = Path(__file__).with_name("cpu_budget.json")
LONG_S = 2.0
SLACK = 2.0
"""Two processes on one core of two threads take longer than one, and the first run compiles."""
SLACK_S = 3.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What a test took."""

    cpu_s: float
    wall_s: float
    name: str

    @property
    def folder(self) -> str:
        """The two highest folders, of `tests`; what is no test stands for itself."""
        if self.name == COLLECTION:
            return COLLECTION
        return "/".join(self.name.partition("::")[0].split("/")[1:-1][:2]) or "."


def measured(text: str) -> list[Measured]:
    """The rows that `--cpu-seconds` has written."""
    rows = (line.split("\t") for line in text.splitlines())
    return [Measured(float(cpu_s), float(wall_s), name) for cpu_s, wall_s, name in rows]


def pace_s() -> float:
    """How long this machine takes for a fixed piece of work."""

    def work() -> float:
        began = time.process_time()
        json.loads(json.dumps([{str(i): [i] * 5} for i in range(40_000)]))
        for _ in range(20):
            np.sort(np.arange(200_000)[::-1] % 977)
        return time.process_time() - began

    return min(work() for _ in range(5))


def by_folder(rows: list[Measured]) -> dict[str, float]:
    """CPU seconds."""
    found: dict[str, float] = defaultdict(float)
    for each in rows:
        found[each.folder] += each.cpu_s
    return dict(sorted(found.items()))


def table(rows: list[Measured]) -> str:
    """Tests, seconds and CPU seconds of each folder."""
    lines = [f"{'folder':<38}{'tests':>7}{'wall s':>9}{'CPU s':>9}"]
    for folder in [*by_folder(rows), "all"]:
        own = [each for each in rows if folder in ("all", each.folder)]
        wall_s, cpu_s = sum(each.wall_s for each in own), sum(each.cpu_s for each in own)
        lines.append(f"{folder:<38}{len(own):>7}{wall_s:>9.1f}{cpu_s:>9.1f}")
    return "\n".join(lines)


def excesses(
    rows: list[Measured], folders: Mapping[str, float], listed: Mapping[str, str], pace: float
) -> list[str]:
    """What is above its budget; `pace`: how much slower this machine is than that of the budget."""
    found = [
        f"{folder}: {cpu_s:.1f} CPU s, its budget is {folders.get(folder, 0.0) * pace:.1f}"
        for folder, cpu_s in by_folder(rows).items()
        if folder != COLLECTION  # of which the first run compiles everything
        and cpu_s > (folders.get(folder, 0.0) * SLACK + SLACK_S) * pace
    ]
    found += [
        f"{each.name}: {each.cpu_s:.1f} CPU s, more than {LONG_S:g}: make it cheaper, "
        f"or move it to the sweep, or list it with its reason in {BUDGET.name}"
        for each in rows
        if each.cpu_s > LONG_S * SLACK * pace and not each.name.startswith((*listed, COLLECTION))
    ]
    ran = {each.name.partition("::")[0]: each for each in rows}
    names = {each.name for each in rows}
    for each in listed:
        if each.partition("::")[0] in ran and not any(name.startswith(each) for name in names):
            found.append(f"{each} is listed and there is none")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cpu_budget", description=__doc__)
    parser.add_argument("file", type=Path, help="what --cpu-seconds has written")
    parser.add_argument("--write", action="store_true", help="record what was measured")
    given = parser.parse_args()
    rows, own_pace_s = measured(given.file.read_text()), pace_s()
    budget = json.loads(BUDGET.read_text())
    print(table(rows))
    if given.write:
        folders = {folder: round(cpu_s, 1) for folder, cpu_s in by_folder(rows).items()}
        budget.update(pace_s=round(own_pace_s, 4), folders=folders)
        BUDGET.write_text(json.dumps(budget, indent=2) + "\n")
        return 0
    pace = max(1.0, own_pace_s / budget["pace_s"])
    found = excesses(rows, budget["folders"], budget["long"], pace)
    print(*found, sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
