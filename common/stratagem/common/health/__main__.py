"""`python -m stratagem.common.health HOST:PORT`: exits with 0 when the service answers SERVING."""

import argparse
import sys

from stratagem.common.health.health_probe import TIMEOUT_S, health_of, is_healthy


def main() -> int:
    """0 when the service answers SERVING, else 1; the answer stands on standard output."""
    parser = argparse.ArgumentParser(prog="python -m stratagem.common.health")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS")
    options = parser.parse_args()
    answer = health_of(options.address, options.timeout)
    print(answer)
    return 0 if is_healthy(answer) else 1


if __name__ == "__main__":
    sys.exit(main())
