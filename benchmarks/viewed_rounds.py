"""Measure what a page keeps of a federation that is looked at: python benchmarks/viewed_rounds.py

    python benchmarks/viewed_rounds.py [ROUNDS CLIENTS]

Makes the events of so many rounds, of each of which a client is rejected, one is late and one is
excused, and reads them as a page does. Prints the memory of what is kept, by tracemalloc (a second
reading, slower) and as the growth of the process, and the time of reading, and of drawing the
panels, again and again, while one more round is read each time.
"""

import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from stratagem.client.course.views import Event, Phase  # noqa: E402
from stratagem.client.pictures.svg import Picture  # noqa: E402
from stratagem.client.report.panels import member_panels  # noqa: E402
from stratagem.client.report.run import (  # noqa: E402
    ReportedRun,
    RunCourse,
)
from stratagem.client.report.strategy_panels import federated_panels  # noqa: E402

JOB = {"strategy": {"type": "Federated", "rounds": 10_000}}


def made(kind: str, payload: Mapping[str, Any], time_s: float) -> Event:
    return Event(0, time_s, kind, "", payload, Phase.RUNNING)


def events_of(number: int, num_clients: int, began_s: float) -> Iterator[Event]:
    """Yield the events of a round."""
    drawn = random.Random(number)
    base = {"party": "", "round_num": number}
    rejected, late, excused = drawn.sample(range(num_clients), 3)
    asked = [client for client in range(num_clients) if client != excused]
    told = {"excused": ({"clients": (excused,), "reason": "it is asked at night"},)}
    yield made("ClientsSelected", {**base, "clients": asked, **told}, began_s)
    assignments = [
        {"client": client, "member": {"worker_id": f"worker-{client:04}", "incarnation": "x"}}
        for client in asked
    ]
    yield made("ClientsAssigned", {**base, "assignments": assignments}, began_s + 0.01)
    accepted = []
    for client in asked:
        if client == late:
            continue
        seconds, at_s = drawn.uniform(2.0, 9.0), began_s + drawn.uniform(2.0, 10.0)
        if client == rejected:
            why = {"cause": "not_finite", "reason": f"weight[{drawn.randrange(99)}] is nan"}
            yield made("UpdateRejected", {**base, "client": client, **why}, at_s)
            continue
        loss, samples = drawn.uniform(0.0, 3.0), 500 + client
        accepted.append({"client": client, "num_samples": samples})
        received = {"loss": loss, "num_samples": samples, "seconds": seconds, "metrics": {}}
        traffic = {"traffic": {"sent_bytes": 40_000 + client}}
        yield made("UpdateReceived", {**base, "client": client, **received, **traffic}, at_s)
    metrics = {f"train.{name}": drawn.random() for name in ("loss", "loss_min", "loss_max")}
    reason = f"round {number}: {len(accepted)} of {len(asked)} updates, deadline passed"
    closed = {"accepted": accepted, "reason": reason, "metrics": metrics}
    yield made("RoundClosed", {**base, **closed}, began_s + 11.0)
    committed = {"party": "", "segment": number, "step": number}
    shown = {name: drawn.random() for name in ("test.loss", "test.accuracy", "train.loss")}
    yield made("SegmentCommitted", {**committed, "metrics": shown}, began_s + 11.5)


def memory_mb() -> float:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def draw(course: RunCourse) -> list[Picture]:
    run = ReportedRun(_Status(), course)  # type: ignore[arg-type]
    panels = [*federated_panels(run, quorum=0.5), *member_panels(run)]
    return [panel.draw(760) for panel in panels]


class _Status:
    job = JOB
    submitted_at_s = 0.0


def read(num_rounds: int, num_clients: int) -> RunCourse:
    course = RunCourse(JOB)
    for number in range(1, num_rounds + 1):
        course.take(events_of(number, num_clients, 1.7e9 + 12.0 * number))
    return course


def main() -> None:
    num_rounds, num_clients = map(int, sys.argv[1:3] or ("10000", "100"))
    draw(read(3, num_clients))  # imports
    before_mb, began_s = memory_mb(), time.process_time()
    course = read(num_rounds, num_clients)
    print(f"{num_rounds} rounds of {num_clients} clients, read in "
          f"{time.process_time() - began_s:.1f} s of CPU")  # fmt: skip
    print(f"memory of the process: {memory_mb() - before_mb:.0f} MB more", flush=True)
    for extra in range(3):
        began_s = time.process_time()
        draw(course)
        print(f"drawn in {time.process_time() - began_s:.2f} s of CPU, "
              f"{memory_mb() - before_mb:.0f} MB more than at first", flush=True)  # fmt: skip
        number = num_rounds + 1 + extra
        course.take(events_of(number, num_clients, 1.7e9 + 12.0 * number))
    del course
    tracemalloc.start()
    kept = read(num_rounds, num_clients)
    gc.collect()
    print(f"kept: {tracemalloc.get_traced_memory()[0] / 2**20:.0f} MiB by tracemalloc")
    for each in tracemalloc.take_snapshot().statistics("lineno")[:12]:
        print(each)
    del kept


if __name__ == "__main__":
    main()
