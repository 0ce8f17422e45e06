"""`python -m stratagem.common.health HOST:PORT ...`: exits with 0 when all services answer SERVING.

HOST may be a variable, as in `$POD_IP:7071`: Kubernetes fills in none in the command of a probe.
"""

import argparse
import os
import sys

from stratagem.common.rpc.health_probe import TIMEOUT_S, health_of, is_healthy


def main() -> int:
    """Print the answer of each service; return 0 if all are SERVING, else 1."""
    parser = argparse.ArgumentParser(prog="python -m stratagem.common.health")
    parser.add_argument("addresses", metavar="HOST:PORT", nargs="+")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS")
    options = parser.parse_args()
    answers = [
        health_of(os.path.expandvars(address), options.timeout) for address in options.addresses
    ]
    print(*answers, sep="\n")
    return 0 if all(map(is_healthy, answers)) else 1


if __name__ == "__main__":
    sys.exit(main())
