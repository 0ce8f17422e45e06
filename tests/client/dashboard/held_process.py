"""A process of a cluster that starts once nobody holds the gate of its name, as
`held_process.py PART`; a coordinator's is "coordinator"."""

import fcntl
import os
import runpy
import sys

if __name__ == "__main__":
    part = sys.argv.pop(1)
    name = sys.argv[sys.argv.index("--name") + 1] if "--name" in sys.argv else part
    with open(os.path.join(os.environ["TEST_HELD"], name), "a") as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)
    runpy.run_module(f"stratagem.{part}", run_name="__main__", alter_sys=True)
