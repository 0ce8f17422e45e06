"""Members of a benchmark, each a process in a network namespace, and lines of JSON between them.

Needs root for namespaces. What a member does is its script's: it reads its orders from stdin.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Member = subprocess.Popen[str]


@contextmanager
def members(names: Sequence[str], cable: str, script: str, flag: str) -> Iterator[list[Member]]:
    """A process of `script flag RANK` in each namespace; gloo goes over the cable there."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    started = [
        subprocess.Popen(
            ("ip", "netns", "exec", name, sys.executable, script, flag, str(rank)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": cable},
        )
        for rank, name in enumerate(names)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def introduce(processes: Sequence[Member]) -> None:
    """Tells each member the addresses of all; they have called `rendezvous`."""
    addresses = [hear(process) for process in processes]
    for process in processes:
        tell(process, addresses)


def tell(process: Member, what: object) -> None:
    """Gives a member an order, or an answer."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()


def hear(process: Member) -> Any:
    """What a member says next."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a member has ended")
    return json.loads(line)


def rendezvous(address: bytes) -> list[bytes]:
    """In a member: says its address and returns those of all, by rank."""
    print(json.dumps(address.hex()), flush=True)
    return [bytes.fromhex(each) for each in json.loads(sys.stdin.readline())]
