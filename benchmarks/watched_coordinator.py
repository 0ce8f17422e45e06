"""A coordinator that writes down what blocks its event loop.

    python benchmarks/watched_coordinator.py FILE FLAGS

A line of JSON for each callback of the loop, and each garbage collection, that takes at least 5 ms:
when it ended, how long it took, how much of that its thread had a processor, and what it was. The
difference of the two is time in which others had the processor, or the interpreter's lock.
"""

import asyncio
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

LEAST_MS = 5.0


@dataclass(frozen=True, slots=True)
class Stall:
    end_s: float
    """Monotonic time, which all processes of a machine share."""
    wall_ms: float
    cpu_ms: float
    """Of the thread that it was in."""
    what: str


def stalls_of(path: Path) -> list[Stall]:
    """Read what a coordinator has written so far."""
    whole = path.read_text().rpartition("\n")[0]
    return [Stall(**json.loads(line)) for line in whole.splitlines()]


def watch(file: TextIO) -> None:
    """Write down the stalls of every loop of this process, and its collections."""
    handles: Any = asyncio.Handle
    run = handles._run
    began: dict[str, tuple[float, float]] = {}

    def note(what: str, since: tuple[float, float]) -> None:
        now_s = time.monotonic()
        if (wall_ms := 1000 * (now_s - since[0])) >= LEAST_MS:
            cpu_ms = 1000 * (time.thread_time() - since[1])
            print(json.dumps(asdict(Stall(now_s, wall_ms, cpu_ms, what))), file=file, flush=True)

    def watched(handle: Any) -> None:
        callback, since = handle._callback, (time.monotonic(), time.thread_time())
        run(handle)
        note(_name_of(callback), since)

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            began["gc"] = (time.monotonic(), time.thread_time())
        else:
            note(f"collection of generation {info['generation']}", began["gc"])

    handles._run = watched
    gc.callbacks.append(collected)


def _name_of(callback: Any) -> str:
    """Return what people know a callback by: that of a task by its coroutine."""
    while isinstance(callback, partial):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return str(getattr(owner.get_coro(), "__qualname__", owner.get_coro()))
    return str(getattr(callback, "__qualname__", callback))


if __name__ == "__main__":
    with Path(sys.argv.pop(1)).open("w") as written:
        from stratagem.coordinator.process.main import main

        watch(written)
        main()
