"""Estimates of a training step's memory against measured peaks, for five kinds of model.

    python benchmarks/memory_estimates.py

Peaks are those of torch's CPU allocator during real steps; seconds are for the estimate alone.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from stratagem.tools.memory.estimate import StepMemory, estimate_memory, text_of
from stratagem.tools.memory.play import measure_training
from stratagem.worker.exchange.layout import ShardOwners
from tests.tools.memory.support import SITE, kind_job

PARTS = ("parameters", "gradients", "optimizer", "activations", "workspace", "buffers")
CASES = {
    "mlp": kind_job(
        "mlp", kwargs={"width": 1024, "depth": 8}, data={"width": 1024}, batch_size=256
    ),
    "cnn": kind_job("cnn", kwargs={"channels": 64}, batch_size=32),
    "transformer": kind_job(
        "transformer",
        kwargs={"width": 256, "depth": 4, "vocabulary": 8000},
        data={"length": 128, "vocabulary": 8000},
        batch_size=8,
    ),
    "rnn": kind_job(
        "rnn", kwargs={"width": 64, "hidden": 256}, data={"length": 64, "width": 64}, batch_size=32
    ),
    "embedding": kind_job("embedding", kwargs={"num_items": 500_000}, batch_size=256),
}


def main() -> None:
    """Print one row for each kind of model."""
    torch.manual_seed(0)
    head = ("model", *PARTS, "total", "measured", "ratio", "seconds")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name, spec in CASES.items():
        started_s = time.perf_counter()
        found: StepMemory = estimate_memory(spec, SITE)
        seconds = time.perf_counter() - started_s
        measured = measure_training(spec, SITE, ShardOwners(0, 1, 1))
        sizes = [text_of(getattr(found, part)) for part in PARTS]
        totals = (text_of(found.total), text_of(measured), f"{found.total / measured:.3f}")
        print(f"| {' | '.join((name, *sizes, *totals, f'{seconds:.1f}'))} |", flush=True)


if __name__ == "__main__":
    main()
