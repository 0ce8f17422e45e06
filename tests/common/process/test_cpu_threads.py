"""How many threads a process computes with, and how they wait."""

import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.common.process.cpu_threads import (
    ThreadChoice,
    cores_within,
    passive_waiting,
    threads_told,
)


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "1"}, ThreadChoice(1, "OMP_NUM_THREADS")),
        ({"OMP_NUM_THREADS": " 4,2 "}, ThreadChoice(4, "OMP_NUM_THREADS")),
        ({"MKL_NUM_THREADS": "3"}, ThreadChoice(3, "MKL_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "2"}, ThreadChoice(2, "MKL_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "many", "MKL_NUM_THREADS": "0"}, None),
        ({"OMP_NUM_THREADS": ""}, None),
    ],
)
def test_the_environment_tells_threads(environ: dict[str, str], told: ThreadChoice | None) -> None:
    assert threads_told(environ) == told


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        (None, {}, 8),
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/pod/container", {"pod/cpu.max": "300000 100000", "cpu.max": "max 100000"}, 3),
        ("0::/outside/of/here", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "6400000 100000"}, 8),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        (
            "5:memory:/\n4:cpu,cpuacct:/docker/x",
            {"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            2,
        ),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_control_groups_limit_the_cores(
    groups: str | None, files: dict[str, str], cores: int, tmp_path: Path
) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    if groups is not None:
        own.write_text(f"{groups}\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    assert cores_within(8, own, root) == cores


def test_a_worker_waits_passively_unless_an_operator_says_how() -> None:
    assert passive_waiting({"OMP_NUM_THREADS": "2"}) == {"OMP_WAIT_POLICY": "passive"}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert passive_waiting({name: "1"}) == {}
    # OpenMP reads its variables once, as torch is loaded.
    program = (
        "import sys, os, stratagem.worker.__main__;"
        "assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.stdout == "passive\n", told.stderr
