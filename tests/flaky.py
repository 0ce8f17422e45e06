"""Runs tests 20 times beside 8 busy processes: `make flaky ARGS="PATH ..."`, for pytest.

The first failure ends it. What passes here passes on a busy machine of CI.
"""

import argparse
import subprocess
import sys
import time

BUSY = 8
TIMES = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.flaky", description=__doc__)
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--busy", type=int, default=BUSY)
    own, given = parser.parse_known_args()
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(own.busy)]
    try:
        for turn in range(1, own.times + 1):
            began = time.monotonic()
            code = subprocess.call([sys.executable, "-m", "pytest", "-q", "-x", *given])
            print(f"turn {turn} of {own.times}: {time.monotonic() - began:.0f} s", flush=True)
            if code:
                return code
    finally:
        for each in others:
            each.kill()
            each.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
