"""What workers recorded of their training steps: one file for each worker and segment of a run.

Joined into one trace in the Trace Event Format, which Chrome and Perfetto show: a process for each
worker, all in the coordinator's time. Not needed for anything else; lost in no crash but a disk's.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import structlog

from stratagem.common.errors import NotFoundError
from stratagem.common.ids import RunId
from stratagem.common.whole_file import whole_file
from stratagem.v1 import worker_pb2

log = structlog.get_logger(__name__)

MAX_RUN_BYTES: Final = 16 * 2**20
"""What a run has recorded beyond this is dropped."""
MAX_EVENT_BYTES: Final = 64 * 2**20
"""A recording that unpacks to more is dropped; no worker of ours sends one."""
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")


class Profiles:
    """Files below `root`, in a folder for each run."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def add(self, run_id: RunId, profile: worker_pb2.Profile) -> None:
        """Keep a recording; one of the same worker, party and segment replaces an earlier one.

        One that cannot be read, which no worker of ours sends, is dropped.
        """
        if not _is_readable(profile):
            log.warning("a recording cannot be read", run_id=run_id, worker_id=profile.worker_id)
            return
        folder = self._root / run_id
        folder.mkdir(parents=True, exist_ok=True)
        content = profile.SerializeToString()
        used = sum(path.stat().st_size for path in folder.iterdir())
        if used + len(content) > MAX_RUN_BYTES:
            return
        party = _UNSAFE.sub("_", profile.party)
        worker = _UNSAFE.sub("_", profile.worker_id)
        path = folder / f"{profile.segment:08}-{party}-{worker}"
        with whole_file(path, durable=False) as file:
            file.write(content)

    def delete(self, run_id: RunId) -> None:
        """Forget what a run has recorded."""
        shutil.rmtree(self._root / run_id, ignore_errors=True)

    def trace(self, run_id: RunId) -> bytes:
        """All of a run as one JSON text. Raises NotFoundError when nothing was recorded."""
        folder = self._root / run_id
        kept = sorted(folder.glob("[!.]*")) if folder.is_dir() else []
        if not kept:
            raise NotFoundError(
                f"run {run_id!r} has recorded nothing; execution.profiling: true does, and the "
                "first recording comes when some steps are done"
            )
        profiles = [worker_pb2.Profile.FromString(path.read_bytes()) for path in kept]
        return json.dumps(joined(profiles)).encode()


def joined(profiles: list[worker_pb2.Profile]) -> dict[str, Any]:
    """One trace; times are microseconds since the earliest event, by the coordinator's clock."""
    read = [(profile, _events(profile)) for profile in profiles]
    first_ns = min((found["base_ns"] for _, found in read), default=0)
    workers = sorted({profile.worker_id for profile, _ in read})
    pids = {worker: number for number, worker in enumerate(workers, start=1)}
    names = {profile.worker_id: _row_name(profile) for profile, _ in read}
    events: list[dict[str, Any]] = []
    for worker, pid in pids.items():
        events.append(_metadata("process_name", pid, {"name": names[worker]}))
        events.append(_metadata("process_sort_index", pid, {"sort_index": pid}))
    for profile, found in read:
        shift_us = (found["base_ns"] - first_ns) / 1000
        events += _timed(profile, pids[profile.worker_id], found["events"], shift_us)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": first_ns,
        "clockErrorSeconds": {
            profile.worker_id: profile.clock_error_s
            for profile, _ in read
            if profile.clock_error_s != float("inf")
        },
    }


def _timed(
    profile: worker_pb2.Profile, pid: int, rows: list[Any], shift_us: float
) -> Iterator[dict[str, Any]]:
    for name, category, begin_us, duration_us, thread in rows:
        event = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": thread}
        event |= {"ts": round(begin_us + shift_us, 3), "dur": duration_us}
        if category == "step":
            event["args"] = {"segment": profile.segment, "party": profile.party}
        yield event


def _is_readable(profile: worker_pb2.Profile) -> bool:
    try:
        found = _events(profile)
        int(found["base_ns"])
        return all(
            isinstance(name, str) and begin_us + duration_us >= 0 and thread is not None
            for name, _category, begin_us, duration_us, thread in found["events"]
        )
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, RecursionError):
        return False


def _events(profile: worker_pb2.Profile) -> dict[str, Any]:
    with gzip.open(io.BytesIO(profile.events_gzip)) as file:
        content = file.read(MAX_EVENT_BYTES + 1)
    if len(content) > MAX_EVENT_BYTES:
        return {"base_ns": 0, "events": []}
    found: dict[str, Any] = json.loads(content)
    return found


def _row_name(profile: worker_pb2.Profile) -> str:
    error = profile.clock_error_s
    clock = "clock not compared" if error == float("inf") else f"clock ± {error * 1e3:.2f} ms"
    return f"{profile.worker_id} ({profile.device_name}, {clock})"


def _metadata(name: str, pid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args}
