"""Codecs over a slow link: time to the same accuracy, beside torch's DDP and its PowerSGD hook.

    sudo python benchmarks/compression.py --mbit 100

Two processes in two network namespaces with a cable between them that carries so many Mbit/s each
way (tc tbf), one thread each; an MLP on the handwritten digits. Needs root, and says so otherwise.
Bytes are what the network interface of a member has counted, so headers are in them. The relative
error is that of one fresh gradient, without error feedback, which makes up for it over the steps.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from stratagem.common.compression import TensorLayout, make_codec
from stratagem.common.job import JobSpec
from stratagem.common.numerics.shards import split_rows
from stratagem.worker.data.order import BatchOrder
from stratagem.worker.data.sources import DataSources, load_data
from stratagem.worker.engine import build_trainer
from stratagem.worker.exchange import mesh_exchange
from stratagem.worker.mesh import form_gloo
from stratagem.worker.models.build import build_model
from stratagem.worker.user_code.entrypoints import EntryPoints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the job's entry points are in examples/

from benchmarks.slow_members import hear, introduce, members, rendezvous, tell  # noqa: E402

HOSTS = ("10.99.77.1", "10.99.77.2")
CABLE = "cable"
PORT = 29_577
WIDTHS = (64, 1024, 512, 10)
BATCH_SIZE, LEARNING_RATE, MOMENTUM, SEED = 128, 0.5, 0.0, 0
ALLOWED = EntryPoints(["examples.digits:*"])
CODECS: dict[str, Any] = {
    "none": "none",
    "fp16": "fp16",
    "int8": "int8",
    "ternary": "ternary",
    "ternary stochastic": {"codec": "ternary", "stochastic": True},
    "top_k 1 %": {"codec": "top_k", "k_fraction": 0.01},
    "low_rank 4": {"codec": "low_rank", "rank": 4},
    "vsa 10 %": {"codec": "vsa", "dimension_fraction": 0.1},
}
THEIRS = ("DDP", "DDP PowerSGD 4")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """One way to train: a step, and the model that it changes."""

    model: nn.Module
    run: Callable[[], object]
    error: float | None
    """Relative error of one gradient; None where it is not known."""
    close: Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=72)
    parser.add_argument("--target", type=float, default=0.95, help="accuracy on the test split")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of the MLP's layers")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--variants", nargs="+", default=[*CODECS, *THEIRS])
    parser.add_argument("--member", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member is not None:
        serve(options.member)
    elif os.geteuid() != 0:
        print("network namespaces need root: sudo python benchmarks/compression.py")
    else:
        measure(options)


# ---- the parent ----


def measure(options: argparse.Namespace) -> None:
    what = f"MLP {' '.join(map(str, options.widths))}, batches of {options.batch_size}"
    print(f"{options.mbit:g} Mbit/s, {options.steps} steps, {what}, target {options.target}")
    head = ("variant", "kB/step", "error", "accuracy", "s to target", "ms/step")
    print("| {} |\n|{}".format(" | ".join(head), "---|" * len(head)))
    with (
        cable(options.mbit) as names,
        members(names, CABLE, __file__, "--member") as processes,
    ):
        for variant in options.variants:
            order = {**vars(options), "variant": variant}
            for process in processes:
                tell(process, order)
            introduce(processes)
            first, _ = [hear(process) for process in processes]
            print("| " + " | ".join(row(variant, first)) + " |", flush=True)
        for process in processes:
            tell(process, {})


def row(variant: str, found: dict[str, Any]) -> Iterator[str]:
    yield variant
    yield f"{found['bytes'] / 1e3:.0f}"
    yield "" if found["error"] is None else f"{found['error']:.2g}"
    yield f"{found['accuracy']:.3f}"
    yield "never" if found["reached_s"] is None else f"{found['reached_s']:.1f}"
    yield f"{1e3 * found['seconds']:.0f}"


@contextmanager
def cable(mbit: float) -> Iterator[tuple[str, str]]:
    """Two namespaces with one cable between them."""
    names = (f"codecs-{os.getpid()}-0", f"codecs-{os.getpid()}-1")

    def ip(*words: str) -> None:
        subprocess.run(("ip", *words), check=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip(
            "link",
            "add",
            CABLE,
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            CABLE,
            "netns",
            names[1],
        )
        for name, host in zip(names, HOSTS, strict=True):
            ip("-n", name, "address", "add", f"{host}/24", "dev", CABLE)
            ip("-n", name, "link", "set", CABLE, "up")
            limit = f"tc qdisc add dev {CABLE} root tbf rate {mbit}mbit burst 64kb latency 200ms"
            subprocess.run(("ip", "netns", "exec", name, *limit.split()), check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "delete", name), check=False)


# ---- a member ----


def serve(rank: int) -> None:
    torch.set_num_threads(1)
    while order := json.loads(sys.stdin.readline()):
        make = make_ddp if order["variant"] in THEIRS else make_ours
        step = make(order, rank)
        print(json.dumps(run(step, order)), flush=True)
        step.close()


def run(step: Step, order: dict[str, Any]) -> dict[str, Any]:
    """Trains, and looks at the test split every few steps; members see the same accuracy."""
    x, y = load_data(job_of(order, "none"), ALLOWED, DataSources())["test"].take(torch.arange(360))

    def accuracy() -> float:
        with torch.no_grad():
            return float((step.model(x).argmax(1) == y).double().mean())

    before, started_s, reached_s = sent_bytes(), time.monotonic(), None
    for number in range(1, order["steps"] + 1):
        step.run()
        if reached_s is None and number % 3 == 0 and accuracy() >= order["target"]:
            reached_s = time.monotonic() - started_s
    seconds = time.monotonic() - started_s
    return {
        "bytes": (sent_bytes() - before) / order["steps"],
        "error": step.error,
        "accuracy": accuracy(),
        "reached_s": reached_s,
        "seconds": seconds / order["steps"],
    }


def sent_bytes() -> int:
    return int(Path(f"/sys/class/net/{CABLE}/statistics/tx_bytes").read_text())


def job_of(order: dict[str, Any], codec: str) -> JobSpec:
    layers = list(itertools.pairwise(order["widths"]))
    nodes: list[dict[str, Any]] = []
    for index, (inputs, outputs) in enumerate(layers):
        kwargs = {"in_features": inputs, "out_features": outputs}
        nodes.append({"id": f"linear{index}", "module": "Linear", "kwargs": kwargs})
        nodes.append({"id": f"relu{index}", "module": "ReLU"})
    names = [node["id"] for node in nodes[:-1]]
    edges = [{"source": a, "target": b} for a, b in itertools.pairwise(names)]
    return JobSpec.parse(
        {
            "name": "compression",
            "model": {"graph": {"nodes": nodes[:-1], "edges": edges}},
            "data": {"entrypoint": "examples.digits:load"},
            "loss": "cross_entropy",
            "optimizer": {"name": "sgd", "lr": LEARNING_RATE, "momentum": MOMENTUM},
            "steps": 10_000,
            "batch_size": order["batch_size"],
            "seed": SEED,
            "strategy": {
                "type": "DataParallel",
                "num_replicas": 2,
                "aggregation": {"method": "AllReduce"},
            },
            "compression": CODECS[codec],
        }
    )


def make_ours(order: dict[str, Any], rank: int) -> Step:
    job = job_of(order, order["variant"])
    error = gradient_error(job)
    trainer = build_trainer(job, ALLOWED, device=CPU, fresh=True)
    link = form_gloo(rank, 2, HOSTS[rank], rendezvous, 30.0)
    exchange = mesh_exchange(trainer.buckets, link, 2, compressor=trainer.compressor)
    owned = range(rank, rank + 1)
    return Step(
        trainer.model, lambda: trainer.train_step(exchange, owned, 2), error, exchange.close
    )


def gradient_error(job: JobSpec) -> float:
    """‖decode(encode(g)) − g‖ / ‖g‖ for the first gradient of a fresh model."""
    model = build_model(job, ALLOWED, device=CPU, fresh=True)
    data = load_data(job, ALLOWED, DataSources())["train"]
    x, y = data.take(torch.arange(job.batch_size))
    nn.functional.cross_entropy(model(x), y).backward()
    grads = [p.grad.reshape(-1).numpy() for p in model.parameters() if p.grad is not None]
    layout = [TensorLayout(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert job.compression is not None
    codec = make_codec(job.compression, layout, SEED, with_feedback=False)
    decoded = codec.decode(codec.encode(grads, codec.initial_state(), 1)[0], 1)
    true, away = np.concatenate(grads), np.concatenate(decoded)
    return float(np.linalg.norm(away - true) / np.linalg.norm(true))


def make_ddp(order: dict[str, Any], rank: int) -> Step:
    variant = order["variant"]
    rendezvous(b"")  # both are here
    address = f"tcp://{HOSTS[0]}:{PORT + THEIRS.index(variant)}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    job = job_of(order, "none")
    model = build_model(job, ALLOWED, device=CPU, fresh=True)
    # One bucket: with several, the hook issues collectives from callbacks, in another order on each
    # member, and gloo ends both.
    defaults: Any = dist
    first_bucket_bytes = defaults._DEFAULT_FIRST_BUCKET_BYTES
    if "PowerSGD" in variant:
        defaults._DEFAULT_FIRST_BUCKET_BYTES = 1 << 30
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1 << 10)
    defaults._DEFAULT_FIRST_BUCKET_BYTES = first_bucket_bytes
    if "PowerSGD" in variant:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    data = load_data(job, ALLOWED, DataSources())["train"]
    batches, numbers = BatchOrder(len(data), job.batch_size, SEED), iter(range(10_000))

    def step() -> None:
        _, indices = batches.batch(next(numbers))
        rows = split_rows(len(indices), 2)[rank]
        x, y = data.take(indices[rows.start : rows.stop])
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()

    return Step(model, step, None, dist.destroy_process_group)


if __name__ == "__main__":
    main()
