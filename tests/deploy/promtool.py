"""Asks promtool what alert rules do on given series; the times are made up, so nothing waits."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.recording import Series

MINUTES = 480
"""How long each of the series goes on."""


@dataclass(frozen=True)
class Asked:
    """Which alerts fire at a minute: (name, deployment), or nothing."""

    minute: int
    firing: frozenset[tuple[str, str]]


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


def check(rules: Path, series: Mapping[Series, str], asked: Sequence[Asked], folder: Path) -> None:
    """Fails unless exactly these alerts fire at these minutes."""
    counted = 'group by (alertname, deployment) (ALERTS{alertstate="firing"})'
    questions = [
        {
            "expr": counted,
            "eval_time": f"{each.minute}m",
            "exp_samples": [
                {"labels": _labels(alertname=name, deployment=deployment), "value": 1}
                for name, deployment in sorted(each.firing)
            ],
        }
        for each in asked
    ]
    tested: dict[str, Any] = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name + _labels(**dict(labels)), "values": values}
                    for (name, labels), values in series.items()
                ],
                "promql_expr_test": questions,
            }
        ],
    }
    file = folder / "test.yml"
    file.write_text(yaml.safe_dump(tested))
    command = [promtool(), "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _labels(**labels: str) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()) if value)
    return f"{{{inside}}}"
