"""What the settings of `execution` cost and save on one worker: peak memory and time of a step.

A stack of residual blocks, trained by the engine in one process. Times are medians of interleaved
rounds, so that a busy machine slows all rows alike; memory is what torch's allocator gave out at
most, beyond parameters and optimizer state, plus the gradients that are held between steps.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.common.job import JobSpec
from stratagem.worker.engine import Trainer, build_trainer
from stratagem.worker.exchange import SingleMemberReducer
from stratagem.worker.user_code.entrypoints import EntryPoints

WIDTH, NUM_BLOCKS, NUM_ROWS = 512, 12, 512
NUM_ROUNDS = 9
MIB = 1 << 20

SETTINGS: dict[str, dict[str, Any]] = {
    "Eager, Single, Full, Standard": {},
    "Checkpointed 2": {"gradient": {"Checkpointed": 2}},
    "Checkpointed 4": {"gradient": {"Checkpointed": 4}},
    "Mixed (bfloat16)": {"precision": "Mixed"},
    "Half (bfloat16)": {"precision": "Half"},
    "Pooled": {"memory": "Pooled"},
    "Cached": {"memory": "Cached"},
    "MinimalPeak": {"memory": "MinimalPeak"},
    "fusion": {"fusion": True},
    "Lazy, fusion": {"mode": "Lazy", "fusion": True},
    "Lazy": {"mode": "Lazy"},
    "Hybrid, fusion": {"mode": "Hybrid", "fusion": True},
    "Hybrid, Checkpointed 4, Mixed, MinimalPeak": {
        "mode": "Hybrid",
        "gradient": {"Checkpointed": 4},
        "precision": "Mixed",
        "memory": "MinimalPeak",
    },
}


class Block(nn.Module):
    """Norm, two products with a smooth nonlinearity between them, dropout, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)), approximate="tanh")
        residual: Tensor = self.drop(self.down(hidden))
        return x + residual


def model() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 10))


class Decoded:
    """Rows that must be decoded: bytes, scaled and transformed for each batch."""

    def __init__(self, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.bytes = torch.randint(0, 256, (num_rows, WIDTH), generator=generator).byte()

    def __len__(self) -> int:
        return len(self.bytes)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.bytes[indices].double()
        return torch.fft.fft(rows).abs().log1p(), indices % 10


def data() -> dict[str, Decoded]:
    return {"train": Decoded(4 * NUM_ROWS)}


def trainer_of(execution: dict[str, Any]) -> Trainer:
    job = JobSpec.parse(
        {
            "name": "benchmark",
            "model": {"entrypoint": "execution_memory:model"},
            "data": {"entrypoint": "execution_memory:data"},
            "loss": "cross_entropy",
            "optimizer": {"name": "adamw", "lr": 0.001},
            "steps": 1000,
            "batch_size": NUM_ROWS,
            "execution": execution,
        }
    )
    allowed = EntryPoints(["execution_memory:*"])
    return build_trainer(job, allowed, device=torch.device("cpu"), fresh=True)


def stepper(trainer: Trainer) -> Callable[[], object]:
    exchange = SingleMemberReducer(trainer.params)
    return lambda: trainer.train_step(exchange, range(1), 1)


def peak_bytes(step: Callable[[], object]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    assert profile.profiler is not None
    results: Any = profile.profiler.kineto_results
    events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    changes: list[int] = [change for _, change in sorted(events)]
    return max(accumulate(changes, initial=0))


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    torch.set_num_threads(1)
    steps, memory = {}, {}
    for name, execution in SETTINGS.items():
        trainer = trainer_of(execution)
        steps[name] = step = stepper(trainer)
        for _ in range(3):
            step()
        held = sum(p.grad.nbytes for _, p in trainer.params if p.grad is not None)
        memory[name] = held + peak_bytes(step)
    times: dict[str, list[float]] = {name: [] for name in steps}
    pages: dict[str, list[int]] = {name: [] for name in steps}
    for _ in range(NUM_ROUNDS):
        for name, step in steps.items():
            before, started = faults(), time.perf_counter()
            step()
            times[name].append(time.perf_counter() - started)
            pages[name].append(faults() - before)
    first = next(iter(steps))
    base_s, base_bytes = statistics.median(times[first]), memory[first]
    print("| execution | peak MiB | ratio | step ms | ratio | page faults |")
    print("|---|---|---|---|---|---|")
    for name in steps:
        median_s = statistics.median(times[name])
        print(
            f"| {name} | {memory[name] / MIB:.0f} | {memory[name] / base_bytes:.2f} "
            f"| {1000 * median_s:.0f} | {median_s / base_s:.2f} "
            f"| {statistics.median(pages[name]):.0f} |"
        )


if __name__ == "__main__":
    main()
