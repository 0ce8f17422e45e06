"""Asks promtool what alert rules do on given series; the times are made up, so nothing waits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.recording import Series

MINUTES = 480
"""How long each of the series goes on."""


@dataclass(frozen=True)
class Asked:
    """Which alerts fire at a minute: (name, deployment), or nothing."""

    minute: int
    firing: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True)
class Scene:
    """What Prometheus has scraped, and what it is asked then."""

    name: str
    series: Mapping[Series, str]
    asked: Sequence[Asked]

    def test(self, rules: str) -> dict[str, Any]:
        """As promtool reads it, without what changes nothing: series that no rule names, and values
        after the last question."""
        last = max(each.minute for each in self.asked)
        told = [
            {"series": name + _labels(**dict(labels)), "values": _until(last, values)}
            for (name, labels), values in self.series.items()
            if name.removesuffix("_bucket").removesuffix("_count") in rules
        ]
        questions = [
            {
                "expr": 'group by (alertname, deployment) (ALERTS{alertstate="firing"})',
                "eval_time": f"{each.minute}m",
                "exp_samples": [
                    {"labels": _labels(alertname=name, deployment=deployment), "value": 1}
                    for name, deployment in sorted(each.firing)
                ],
            }
            for each in self.asked
        ]
        known = {"name": self.name, "interval": "1m", "input_series": told}
        return {**known, "promql_expr_test": questions}


def promtool() -> str:
    beside = Path(sys.executable).parent / "promtool"
    found = beside if beside.exists() else shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool: `.ci/promtool .venv/bin`, or apt-get install prometheus")
    return str(found)


def constant(value: float) -> str:
    return f"{value!r}+0x{MINUTES}"


def then(before: float | None, minute: int, after: float | None, rise: float = 0.0) -> str:
    """One value, and from a minute on another, which may rise by so much a minute; None: absent."""

    def part(value: float | None, count: int, step: float) -> str:
        return f"_x{count + 1}" if value is None else f"{value!r}{step:+}x{count}"

    return f"{part(before, minute - 1, 0.0)} {part(after, MINUTES - minute, rise)}"


def check(rules: Path, scenes: Sequence[Scene], folder: Path) -> None:
    """Fails unless in each scene exactly these alerts fire at these minutes."""
    text = rules.read_text()
    tests = [scene.test(text) for scene in scenes]
    told = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}
    file = folder / "test.yml"
    file.write_text(json.dumps(told))  # which is YAML, too
    command = [promtool(), "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _until(minute: int, values: str) -> str:
    """Values without most of those that come after a minute."""
    begin, _, count = values.rpartition("x")
    return f"{begin}x{min(minute, int(count))}"


def _labels(**labels: str) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()) if value)
    return f"{{{inside}}}"
