"""Runs one check in this process and prints what it came to as a line of JSON.

python -m tests.device.one_check kernels cuda:0
"""

import json
import sys
from importlib import import_module

import torch

from tests.device.check_table import CHECKS, CheckStatus, SkippedError


def main(name: str, device: str) -> None:
    """Any exception but a skip is a failure, and its traceback goes to stderr."""
    torch.set_num_threads(1)
    module = import_module(f"tests.device.{CHECKS[name][0]}_checks")
    try:
        status, said = CheckStatus.PASS, getattr(module, name)(torch.device(device))
    except SkippedError as reason:
        status, said = CheckStatus.SKIP, str(reason)
    print(json.dumps({"status": status.value, "said": said}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
