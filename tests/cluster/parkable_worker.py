"""A worker process that starts once nobody holds the gate of its name; see conftest.parking."""

import fcntl
import os
import runpy
import sys

if __name__ == "__main__":
    name = sys.argv[sys.argv.index("--name") + 1]
    with open(os.path.join(os.environ["TEST_PARKING"], name), "a") as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)
    runpy.run_module("stratagem.worker", run_name="__main__", alter_sys=True)
