"""Runs all checks of a device, each in a process of its own, and prints them as a table.

    python -m tests.device --device cuda:0

A check fails that raises, dies, or takes longer than the limit. The exit status is 1 if one has
failed. A check that did not run is never said to have passed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import torch

from tests.device.check_table import CHECKS, CheckResult, CheckStatus, table_of
from tests.repository import ROOT


def run_check(name: str, device: str, limit_s: float) -> CheckResult:
    """Run one check; whatever it has started ends with it."""
    begun_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.device.one_check", name, device],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told, wrong = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        told, wrong = "", f"took longer than {limit_s:.0f} s"
    finally:
        _end(process)
    seconds = time.monotonic() - begun_s
    if process.returncode == 0:
        answer = json.loads(told.splitlines()[-1])
        return CheckResult(name, CheckStatus(answer["status"]), seconds, answer["said"])
    reason = wrong.strip().splitlines()[-1] if wrong.strip() else f"exit {process.returncode}"
    sys.stderr.write(f"---- {name}\n{wrong}\n")
    return CheckResult(name, CheckStatus.FAIL, seconds, reason)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):  # all of its group have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--limit-s", type=float, default=60.0)
    asked = parser.parse_args()
    results = []
    for name in asked.only:
        results.append(run_check(name, asked.device, asked.limit_s))
        print(f"{results[-1].status.value} {name} {results[-1].said}", file=sys.stderr, flush=True)
    print(table_of(results))
    return int(any(result.status is CheckStatus.FAIL for result in results))


if __name__ == "__main__":
    sys.exit(main())
