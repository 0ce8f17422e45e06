"""What the step history costs: a step, a segment's transaction, and a client that comes late.

    python benchmarks/history.py

Recording on and off take turns; so do transactions with and without a history. Six series are
recorded: loss, gradient norm, learning rate, time, rows per second, waiting. The late client asks a
coordinator process for 30,000 steps in 300 segments, over loopback, at the stride of such a run and
where every row is one step. The values are random, which compresses badly.

Last, one value in 30,000 is another one: at how many of the steps it would be seen in the step
history, and in what TensorBoard and an offline run of W&B keep to show, which the benchmark skips
where they are not installed.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from contextlib import closing
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sinks.files import TensorBoardSink
from stratagem.client.sinks.sink import RowBlock, SinkRun
from stratagem.common.base.ids import Party, RunId
from stratagem.common.history import Columns, Recorder, Series, stride_of
from stratagem.common.history.columns import MAX_ROWS
from stratagem.common.history.recording import pack, pack_columns
from stratagem.coordinator.store import step_history as step_histories
from stratagem.coordinator.store.journal import Journal, Record
from stratagem.coordinator.store.lead import Holder
from stratagem.coordinator.store.step_history import HistoryRow
from stratagem.v1 import worker_pb2
from stratagem.worker.engine import StepReport
from stratagem.worker.plans.history import StepHistory
from stratagem.worker.session.control import MemberView
from tests.jobs import document

NUM_STEPS = 30_000
NUM_SEGMENTS = 300
PER_SEGMENT = NUM_STEPS // NUM_SEGMENTS
NAMES = ("train.loss", "train.grad_norm", "train.lr", "time.wall_s", "time.rows_per_s",
         "time.exchange_wait_s")  # fmt: skip
SERIES = [Series(name, name.startswith("time.")) for name in NAMES]
RUN, PARTY = RunId("run"), Party("member0")


def step_history(stride: int) -> StepHistory:
    """One that sends to nobody."""
    holding = SimpleNamespace(
        recorder=None,
        own_recorders={},
        applied_step=0,
        answer=SimpleNamespace(logged={}),
        tally=SimpleNamespace(latest={}),
    )
    outbox = SimpleNamespace(add_history=lambda part: None, restart_history=lambda: None)
    work: Any = SimpleNamespace(
        holding=holding,
        outbox=outbox,
        job=SimpleNamespace(recording=None),
        host=SimpleNamespace(worker_id="worker-0", device=torch.device("cpu")),
        post=lambda call, *arguments: call(*arguments),
    )
    plan, view = worker_pb2.TrainPlan(history_stride=stride), MemberView(1, 1, 0, ())
    return StepHistory(work, plan, view, 0)


def cpu_per_step(reports: list[StepReport], stride: int) -> float:
    history = step_history(stride)
    began_s = time.process_time()
    for report in reports:
        history.add(report, 0.001)
    history.end({})
    return (time.process_time() - began_s) / len(reports)


def report_of(step: int) -> StepReport:
    return StepReport(
        *(step, random.random(), 1.0, 32, False, random.random()),
        learning_rates={"train.lr": random.random()},
        exchange_wait_s=random.random(),
    )


def recorder(num_pairs: int) -> None:
    print(f"| recorder, {len(SERIES)} series | CPU us per step, on | off | difference |")
    print("|---|---|---|---|")
    for num_steps in (MAX_ROWS, NUM_STEPS):
        reports, stride = (
            [report_of(step) for step in range(1, num_steps + 1)],
            stride_of(num_steps),
        )
        pairs = [
            (cpu_per_step(reports, stride), cpu_per_step(reports, 0)) for _ in range(num_pairs)
        ]
        on, off = (statistics.median(each) * 1e6 for each in zip(*pairs, strict=True))
        more = statistics.median(a - b for a, b in pairs) * 1e6
        what = f"{num_steps} steps, stride {stride}, {num_pairs} pairs"
        print(f"| {what} | {on:.2f} | {off:.2f} | {more:.2f} |")


def segment(number: int, stride: int, num_steps: int) -> HistoryRow:
    first = (number - 1) * num_steps
    recording = Recorder(stride, first)
    for step in range(first + 1, first + num_steps + 1):
        recording.add(step, [(series, random.random()) for series in SERIES])
    rows = pack(recording.end())
    return HistoryRow(RUN, PARTY, number, stride, first, first + num_steps, rows)


def transactions(num_pairs: int) -> None:
    metrics = ",".join(f'"m{i}":0.5' for i in range(20))
    payload = '{"party":"","segment":1,"metrics":{' + metrics + "}}"
    print("\n| SegmentFinished, SQLite | block bytes | ms without | ms with | ratio | of the CPU |")
    print("|---|---|---|---|---|---|")
    for what, num_steps in (("100 steps", 100), ("all 30,000 steps", NUM_STEPS)):
        blocks = [segment(number, stride_of(NUM_STEPS), num_steps) for number in range(1, 9)]
        with tempfile.TemporaryDirectory() as folder:
            journal = Journal.open(Path(folder) / "journal.sqlite")
            with closing(journal):
                term = journal.take_lead(Holder.of_this_process(), ttl_s=60).term
                took_s: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
                for number in range(2 * num_pairs):
                    is_on = number % 2 == 1
                    record = Record(RUN, number, "SegmentFinished", 1, payload, 0.0, 0.0)
                    block = blocks[number // 2 % len(blocks)]
                    row = HistoryRow(RUN, PARTY, number, block.stride, 0, 1, block.rows)
                    began_s, cpu_s = time.perf_counter(), time.process_time()
                    journal.append(term, [record], histories=[row] if is_on else [])
                    took = time.perf_counter() - began_s, time.process_time() - cpu_s
                    took_s[is_on].append(took)
        (off, cpu_off), (on, cpu_on) = (
            [statistics.median(each) * 1e3 for each in zip(*took_s[is_on], strict=True)]
            for is_on in (False, True)
        )
        ratios = f"{on / off:.2f} | {cpu_on:.3f} / {cpu_off:.3f} = {cpu_on / cpu_off:.2f}"
        size = len(blocks[0].rows)
        print(f"| {what}, {num_pairs} pairs | {size} | {off:.3f} | {on:.3f} | {ratios} |")


def late(num_times: int) -> None:
    print("\n| late client, 30,000 steps, 6 series | rows | KB | ms, median | most |")
    print("|---|---|---|---|---|")
    for stride in (stride_of(NUM_STEPS), 1):
        with (
            tempfile.TemporaryDirectory() as folder,
            LocalCluster(workers=0, data_dir=Path(folder)) as cluster,
            cluster.client() as client,
        ):
            run = client.submit(document(), RUN)
            store(Path(folder) / "coordinator" / "journal.sqlite", stride)
            took_s, num_rows, num_bytes = [], 0, 0
            for _ in range(num_times):
                began_s = time.perf_counter()
                history = run.history(parties=PARTY)
                took_s.append(time.perf_counter() - began_s)
                num_rows = sum(map(len, history.values()))
                num_bytes = sum(len(pack_columns(each.columns)) for each in history.values())
            median, most = statistics.median(took_s) * 1e3, max(took_s) * 1e3
            sizes = f"{num_rows} | {num_bytes / 1000:.0f}"
            print(f"| stride {stride} | {sizes} | {median:.0f} | {most:.0f} |")


def store(place: Path, stride: int) -> None:
    """Write the history into the journal of a coordinator that runs."""
    rows = [segment(number, stride, PER_SEGMENT) for number in range(1, NUM_SEGMENTS + 1)]
    journal = Journal.open(place)
    with closing(journal), journal._database.write() as connection:
        step_histories.put(connection, rows)


def spikes() -> None:
    print("\n| a value of one step in 30,000 | points | seen at |")
    print("|---|---|---|")
    recording, stride = Recorder(stride_of(NUM_STEPS), 0), stride_of(NUM_STEPS)
    for step in range(1, NUM_STEPS + 1):
        recording.add(step, [(SERIES[0], float(step))])
    rows = recording.end()[SERIES[0]]
    seen = sum(
        low <= step <= high and high - low < stride
        for first, low, high in zip(rows.step - stride + 1, rows.min, rows.max, strict=True)
        for step in range(first, first + stride)
    )
    print(f"| step history | {len(rows)} | {share(seen)} |")
    for name, kept in (("TensorBoard", tensorboard_points), ("W&B, offline", wandb_points)):
        try:
            points = kept()
        except ImportError as error:
            print(f"\n{name} is left out: {error}")
            continue
        print(f"| {name} | {len(points)} | {share(len(points))} |")


def share(num_steps: int) -> str:
    return f"{num_steps} of {NUM_STEPS} steps ({num_steps / NUM_STEPS:.1%})"


def tensorboard_points() -> set[int]:
    """The steps that TensorBoard keeps of a curve, with what it is set to by default."""
    ingester: Any = import_module("tensorboard.backend.event_processing.data_ingester")
    reader: Any = import_module("tensorboard.backend.event_processing.plugin_event_accumulator")
    steps = np.arange(1, NUM_STEPS + 1)
    values = steps.astype(np.float64)
    ones, none = np.ones(NUM_STEPS, np.int64), np.zeros(NUM_STEPS, np.int64)
    columns = Columns(steps, values, values, values, ones, none)
    with tempfile.TemporaryDirectory() as folder:
        sink = TensorBoardSink(folder)
        sink.open(SinkRun(RUN, "run", "Local", 1.0))
        sink.rows(RowBlock("", NAMES[0], 1, observed=False, columns=columns))
        sink.close()
        found = reader.EventAccumulator(
            str(Path(folder) / RUN), tensor_size_guidance=ingester.DEFAULT_TENSOR_SIZE_GUIDANCE
        )
        found.Reload()
        return {event.step for event in found.Tensors(NAMES[0])}


def wandb_points() -> set[float]:
    """The steps that W&B keeps of a curve, to show it when a run without a server ends."""
    wandb: Any = import_module("wandb")
    with tempfile.TemporaryDirectory() as folder:
        settings = wandb.Settings(silent=True, console="off", x_disable_meta=True)
        run = wandb.init(mode="offline", dir=folder, settings=settings)
        for step in range(1, NUM_STEPS + 1):
            run.log({NAMES[0]: float(step)})
        run.finish()
        (curve,) = (item for item in run._sampled_history.item if item.key == NAMES[0])
        return set(curve.values_float)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--commits", type=int, default=500)
    chosen = parser.parse_args()
    recorder(chosen.pairs)
    transactions(chosen.commits)
    late(chosen.pairs)
    spikes()


if __name__ == "__main__":
    main()
