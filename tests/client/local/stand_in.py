"""A stand-in for a coordinator or worker process: says that it is ready, then waits for a signal.

It writes its own arguments and environment to its data folder. A file `die` there makes it end
before it is ready, with the status that the file holds.
"""

import json
import os
import signal
import sys
from pathlib import Path


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def main() -> None:
    if "--coordinator" in sys.argv and option("--coordinator") == "-":
        sys.argv[sys.argv.index("-")] = sys.stdin.readline().strip()
    folder = Path(option("--data-dir"))
    facts = {"argv": sys.argv[1:], "failpoints": os.environ.get("STRATAGEM_FAILPOINTS")}
    (folder / "facts.json").write_text(json.dumps(facts))
    if (folder / "die").exists():
        print("I was told to die")
        sys.exit(int((folder / "die").read_text()))
    listen = option("--listen")
    address = f"127.0.0.1:{os.getpid()}" if listen.endswith(":0") else listen
    ready_file = Path(option("--ready-file"))
    part = ready_file.with_name(ready_file.name + ".part")
    part.write_text(address + "\n")
    part.rename(ready_file)
    if (folder / "stubborn").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


main()
