"""Steps of a tiny GPT-2 of transformers against the loop that everybody writes and Accelerate.

    python benchmarks/interop_step.py --rounds 5

The model, data and settings are those of examples/interop/gpt2.yaml: rows are fetched one by
one and padded, batches have 16 of them. One thread for each process. In each round all variants
take turns, so that whatever else the machine does hits all of them; printed are medians over the
rounds, and of the ratios within a round. "local" and "two workers" are runs on a cluster inside
this machine: the time from the first to the last commit, so commits are in it and the start is not.
"accelerate" is two processes over gloo. "evaluation" compares the metrics of torchmetrics on
examples/interop/bert.py with a plain loop, in this process.
"""

import argparse
import multiprocessing as mp
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from examples.interop import bert, gpt2  # noqa: E402
from stratagem.client.course.views import Event  # noqa: E402
from stratagem.client.local.cluster import LocalCluster  # noqa: E402
from stratagem.client.sdk.blocking import Client  # noqa: E402
from stratagem.common.job import JobSpec, load_job  # noqa: E402
from stratagem.worker.engine import build_inference  # noqa: E402
from stratagem.worker.user_code.entrypoints import EntryPoints  # noqa: E402

BATCH_SIZE, NUM_ROWS, NUM_EVALUATED = 16, 2048, 2048
STEPS = 150
REPLICAS = {
    "type": "DataParallel",
    "num_replicas": 2,
    "aggregation": {"method": "AllReduce"},
}


def optimizer_of(model: nn.Module) -> tuple[Any, Any]:
    """The optimizer and the schedule of the job."""
    small = [param for param in model.parameters() if param.dim() == 1]
    large = [param for param in model.parameters() if param.dim() > 1]
    groups: list[dict[str, Any]] = [{"params": large}, {"params": small, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.003, eps=1e-6, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.003, 10**6)


def batches(batch_size: int) -> Iterator[dict[str, Tensor]]:
    rows: Any = gpt2.load(NUM_ROWS)["train"]
    while True:
        yield from DataLoader(rows, batch_size, shuffle=True, collate_fn=gpt2.pad)


def plain() -> Callable[[int], float]:
    """Makes steps of the plain loop; returns what they take in seconds."""
    torch.manual_seed(0)
    model, data = gpt2.build_model().train(), batches(BATCH_SIZE)
    optimizer, schedule = optimizer_of(model)

    def run(num_steps: int) -> float:
        begun_s = time.perf_counter()
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss = model(**next(data)).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            loss.item()  # as any loop that prints it
        return time.perf_counter() - begun_s

    return run


def accelerated(rank: int, port: int, orders: Connection) -> None:
    """One process of Accelerate: makes as many steps as it is told, and says what they took."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    from accelerate import Accelerator

    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    data = batches(BATCH_SIZE // 2)
    own = gpt2.build_model().train()
    optimizer, schedule = optimizer_of(own)
    model, optimizer = accelerator.prepare(own, optimizer)
    while num_steps := orders.recv():
        accelerator.wait_for_everyone()
        begun_s = time.perf_counter()
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss = model(**next(data)).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            loss.item()
        accelerator.wait_for_everyone()
        orders.send(time.perf_counter() - begun_s)


def two_processes() -> Callable[[int], float]:
    context = mp.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ends = [context.Pipe() for _ in range(2)]
    for rank, (_, theirs) in enumerate(ends):
        context.Process(target=accelerated, args=(rank, port, theirs), daemon=True).start()

    def run(num_steps: int) -> float:
        for ours, _ in ends:
            ours.send(num_steps)
        taken: list[float] = [ours.recv() for ours, _ in ends if num_steps]
        return max(taken, default=0.0)

    return run


def on_cluster(client: Client, strategy: dict[str, Any]) -> Callable[[int], float]:
    spec: dict[str, Any] = {**load_job(ROOT / "examples/interop/gpt2.yaml").document()}
    spec["data"] = {**spec["data"], "kwargs": {"num_rows": NUM_ROWS}}
    spec |= {"strategy": strategy, "evaluation": None, "epochs": None}

    def run(num_steps: int) -> float:
        """Seconds from the first commit to the last, which are so many steps apart."""
        sections = {**spec, "steps": 2 * num_steps, "checkpoint": {"every": f"{num_steps} steps"}}
        given = {key: value for key, value in sections.items() if value is not None}
        handle = client.submit(JobSpec.parse(given))
        handle.result()
        events = [event for event in handle.watch() if isinstance(event, Event)]
        times_s = [event.time_s for event in events if event.kind == "SegmentCommitted"]
        return times_s[-1] - times_s[0]

    return run


def evaluations() -> tuple[Callable[[], float], Callable[[], float]]:
    """(the plain loop, the engine), each in seconds."""
    metrics = [f"examples.interop.bert:{name}" for name in ("f1", "auroc")]
    spec = {
        "name": "evaluation",
        "model": {"entrypoint": "examples.interop.bert:build_model"},
        "data": {
            "entrypoint": "examples.interop.bert:load",
            "kwargs": {"num_test_rows": NUM_EVALUATED},
        },
        "loss": "model",
        "execution": {"gradient": "None"},
        "evaluation": {"metrics": metrics, "batch_size": 64},
    }
    allowed = EntryPoints(["examples.interop.*:*"])
    engine = build_inference(JobSpec.parse(spec), allowed, device=torch.device("cpu"), fresh=True)
    rows: Any = bert.load(num_test_rows=NUM_EVALUATED)["test"]
    model: Any = bert.build_model()
    model.eval()

    def loop() -> float:
        begun_s = time.perf_counter()
        made = [bert.f1(), bert.auroc()]
        total = 0.0
        with torch.inference_mode():
            for batch in DataLoader(rows, 64, collate_fn=default_collate):
                output = model(**batch)
                total += output.loss.item() * len(batch["labels"])
                for metric in made:
                    metric.update(output.logits, batch["labels"])
        assert all(float(metric.compute()) >= 0 for metric in made)
        return time.perf_counter() - begun_s

    def own() -> float:
        begun_s = time.perf_counter()
        parts = [engine.part("test", n) for n in range(engine.evaluator.num_batches("test"))]
        measure = engine.evaluator.own
        assert measure is not None
        measure.measured("test", [part.kept for part in parts if part.kept is not None])
        return time.perf_counter() - begun_s

    return loop, own


def shown(name: str, against: str, pairs: list[tuple[float, float]], count: int) -> None:
    """pairs: seconds of both in each round."""
    rates = [statistics.median(count / each[i] for each in pairs) for i in (0, 1)]
    ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    print(f"{name:24}{rates[0]:10,.1f}/s   {against:14}{rates[1]:10,.1f}/s   {ratio:6.2f} x")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            workers=2,
            threads=1,
            data_dir=Path(folder),
            import_path=[ROOT],
            allow=["examples.interop.*:*"],
        ) as cluster,
        cluster.client() as client,
    ):
        loop, accelerate = plain(), two_processes()
        local, replicas = on_cluster(client, {"type": "Local"}), on_cluster(client, REPLICAS)
        loop_evaluates, own_evaluates = evaluations()
        alone, both, measured = [], [], []
        for round_num in range(options.rounds + 1):
            times_s = [run(options.steps) for run in (local, loop, replicas, accelerate)]
            evaluated = own_evaluates(), loop_evaluates()
            if round_num:  # the first one warms up
                alone.append((times_s[0], times_s[1]))
                both.append((times_s[2], times_s[3]))
                measured.append(evaluated)
        accelerate(0)
    shown("local, steps", "plain loop", alone, options.steps)
    shown("two workers, steps", "accelerate", both, options.steps)
    shown("evaluation, rows", "plain loop", measured, NUM_EVALUATED)


if __name__ == "__main__":
    main()
