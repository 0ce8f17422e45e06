"""How long training stands still for a snapshot: copies into new memory against memory used before.

    python benchmarks/snapshot_stall.py --rounds 9

The state is that of a transformer trained with AdamW: embeddings of 50,000 words, and blocks up to
`--megabytes`. Two snapshots are kept, as a worker does. The two ways take turns inside one process,
whose allocator is tuned as a worker's. Printed are the medians of wall and CPU seconds and of page
faults of a copy, and of the check of all bits that the members compare after it.
"""

import argparse
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from stratagem.common.process.process import tune_malloc
from stratagem.worker.engine.state_format import copied, fingerprint

WIDTH = 1024
NUM_WORDS = 50_000
BLOCK = {
    "attention": (3 * WIDTH, WIDTH),
    "up": (4 * WIDTH, WIDTH),
    "down": (WIDTH, 4 * WIDTH),
    "norm": (WIDTH,),
}
KINDS = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")


def make_state(num_bytes: int) -> dict[str, Tensor]:
    """Parameters and moments of blocks, as many as the bytes are enough for."""
    tensors = {f"{kind}/words": torch.randn(NUM_WORDS, WIDTH) for kind in KINDS}
    block = 0
    while sum(tensor.nbytes for tensor in tensors.values()) < num_bytes:
        for layer, shape in BLOCK.items():
            tensors |= {f"{kind}/{block}.{layer}": torch.randn(shape) for kind in KINDS}
        block += 1
    return tensors


def timed(call: Callable[[], object]) -> tuple[float, float, float]:
    """(wall seconds, CPU seconds, page faults)."""
    wall_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    call()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - wall_s, cpu_s, after.ru_minflt - before.ru_minflt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=1000)
    options = parser.parse_args()
    tune_malloc()
    torch.set_num_threads(1)
    state = make_state(options.megabytes * 10**6)
    fresh = deque((copied(state), copied(state)), maxlen=2)
    used = deque((copied(state), copied(state)), maxlen=2)
    ways: dict[str, Callable[[], object]] = {
        "into new memory": lambda: fresh.append(copied(state)),
        "into the oldest snapshot": lambda: used.append(copied(state, used.popleft())),
        "check of all bits": lambda: fingerprint(state, {}),
    }
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            times[name].append(timed(way))
    total = sum(tensor.nbytes for tensor in state.values())
    print(f"{total / 1e6:.0f} MB in {len(state)} tensors, {options.rounds} rounds, medians")
    for name, rows in times.items():
        medians = (statistics.median(column) for column in zip(*rows, strict=True))
        print("{:28}{:8.3f} s{:8.3f} CPU s{:10.0f} page faults".format(name, *medians))


if __name__ == "__main__":
    main()
