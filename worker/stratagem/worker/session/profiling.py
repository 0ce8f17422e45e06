"""Record a worker's activity during a few steps of each segment, by torch's profiler.

The record is bounded: a warm-up step, `NUM_STEPS` recorded ones, and the longest `MAX_EVENTS`
events. Profiles are sent to the coordinator with the log; a lost one does not affect the run.
"""

import gzip
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from stratagem.common.process.process import temporary_folder
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.session.context import ExecutionContext

NUM_STEPS: Final = 4
MAX_EVENTS: Final = 20_000
MAX_NAME_CHARS: Final = 200
STEP_CATEGORY: Final = "step"
_TIMED: Final = "X"
TRAINING: Final = "training step "
EVALUATING: Final = "evaluated batch "
_OWN: Final = (TRAINING, EVALUATING)


class StepRecorder:
    """Records steps by torch's profiler: a context manager around a segment's steps."""

    def __init__(self, work: ExecutionContext, name: str = TRAINING) -> None:
        """Take the settings. name: the name of a step in the recording. Evaluations are recorded if
        nothing else is."""
        self._work, self._name = work, name
        job = work.job
        self._records = job.execution.profiling and (name == TRAINING or job.only_evaluates)
        self._profiler: profile | None = None
        self._span = ExitStack()
        self._num_begun = 0

    def __enter__(self) -> Self:
        return self

    def begin(self, step: int, num_to_come: int) -> None:
        """Begin step `step`, ending the one before. num_to_come: steps left, including this one."""
        if not self._records or self._num_begun > NUM_STEPS + 1:
            return
        if self._profiler is None:
            self._profiler = self._start(0 if num_to_come < 2 else 1)
        else:
            self._span.close()
            self._profiler.step()
        self._num_begun += 1
        self._span.enter_context(record_function(f"{self._name}{step}"))

    def __exit__(self, *_: object) -> None:
        self._span.close()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _start(self, num_warm_up: int) -> profile:
        activities = [ProfilerActivity.CPU]
        if self._work.host.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for one step, without a warm-up
            plan = schedule(wait=0, warmup=num_warm_up, active=NUM_STEPS, repeat=1)
        profiler = profile(activities=activities, schedule=plan, on_trace_ready=self._send)
        profiler.start()
        return profiler

    def _send(self, profiler: profile) -> None:
        with temporary_folder("trace") as folder:
            path = folder.path / "trace.json"
            profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
        work, offset = self._work, self._work.host.clock.offset
        device = work.host.device
        sent = pb.Profile(
            worker_id=work.host.worker_id,
            party=work.key.party,
            segment=work.segment,
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            clock_error_s=offset.error_s,
            events_gzip=gzip.compress(json.dumps(compacted(trace, offset.seconds)).encode(), 6),
        )
        work.post(work.outbox.add_profile, sent)


def compacted(trace: Mapping[str, Any], offset_s: float) -> dict[str, Any]:
    """Return the timed events of a torch trace as JSON, in the coordinator's time.

    {"base_ns": the origin of times, "events": [[name, category, begin_us, duration_us, thread]]}
    """
    timed = [event for event in trace["traceEvents"] if event.get("ph") == _TIMED]
    steps = [event for event in timed if event["name"].startswith(_OWN)]
    others = [
        event
        for event in timed
        if isinstance(event["pid"], int) and not event["name"].startswith((*_OWN, "ProfilerStep#"))
    ]
    if len(others) > MAX_EVENTS:
        others = sorted(others, key=lambda event: -event["dur"])[:MAX_EVENTS]
    first_us = min((event["ts"] for event in timed), default=0.0)
    base_ns = trace.get("baseTimeNanoseconds", 0) + round(first_us * 1000) + round(offset_s * 1e9)
    rows = [_row(event, STEP_CATEGORY, first_us) for event in steps]
    rows += [_row(event, event.get("cat", ""), first_us) for event in others]
    return {"base_ns": base_ns, "events": rows}


def _row(event: Mapping[str, Any], category: str, first_us: float) -> Sequence[Any]:
    begin_us = round(event["ts"] - first_us, 3)
    return [
        event["name"][:MAX_NAME_CHARS],
        category,
        begin_us,
        round(event["dur"], 3),
        event["tid"],
    ]
