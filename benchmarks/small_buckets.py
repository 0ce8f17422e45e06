"""Where a small bucket goes: gathered by all, up and down a tree, or in slices (direct).

    python benchmarks/small_buckets.py --members 2 4 8

One bucket, nothing computed, over gloo and over gRPC; processes on this machine, one thread each.
Median microseconds from the first to the last member, for the thresholds in
`worker/stratagem/worker/exchange/all_reduce.py`.
"""

import argparse
import multiprocessing as mp
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.data_parallel import Setup, form
from stratagem.common.process.process import tune_malloc
from stratagem.worker.exchange import GradientBuckets, StepScalars, all_reduce, mesh_exchange
from stratagem.worker.exchange.transports import num_scalars

NO_SCALARS = StepScalars(0.0, 0.0, 0.0, [1.0], torch.zeros(0, dtype=torch.float64))
NEVER, ALWAYS = 0, 2**60
WAYS = {"gather": (ALWAYS, ALWAYS), "tree": (ALWAYS, 1), "direct": (NEVER, 1)}
"""(SMALL_BYTES, MAX_GATHER_MEMBERS)"""
SIZES_BYTES = [256, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20]


def run_member(pipe: Connection, engine: str, rank: int, size: int, num_steps: int) -> None:
    tune_malloc()
    torch.set_num_threads(1)
    for size_bytes in SIZES_BYTES:
        for small_bytes, max_members in WAYS.values():
            all_reduce.SMALL_BYTES, all_reduce.MAX_GATHER_MEMBERS = (
                small_bytes,
                max_members,
            )
            params = [("p", nn.Parameter(torch.ones(size_bytes // 4)))]
            buckets = GradientBuckets(params, num_extras=num_scalars(1, 0))
            exchange = mesh_exchange(buckets, form(engine, Setup("", rank, size, pipe)), size)
            for step in range(num_steps):
                begun = time.perf_counter()
                exchange.begin_step(step, range(rank, rank + 1), size)
                exchange.begin_shard(rank)
                exchange.end_shard(rank, NO_SCALARS)
                exchange.finish()
                if step >= num_steps // 4:
                    pipe.send(time.perf_counter() - begun)
            pipe.recv()
            exchange.close()
    os._exit(0)


def measure(engine: str, size: int, num_steps: int) -> None:
    context = mp.get_context("spawn")
    pipes = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        args = (theirs, engine, rank, size, num_steps)
        context.Process(target=run_member, args=args, daemon=True).start()
        pipes.append(ours)
    for size_bytes in SIZES_BYTES:
        cells = []
        for way in WAYS:
            addresses = [pipe.recv() for pipe in pipes]
            for pipe in pipes:
                pipe.send(addresses)
            times_s = [
                max(pipe.recv() for pipe in pipes) for _ in range(num_steps - num_steps // 4)
            ]
            for pipe in pipes:
                pipe.send("close")
            cells.append(f"{way} {1e6 * statistics.median(times_s):7.0f}")
        print(f"{engine:<5} {size:>2} {size_bytes:>8} bytes  {'  '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--engines", nargs="+", default=["gloo", "grpc"])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    for engine in args.engines:
        for size in args.members:
            measure(engine, size, args.steps)


if __name__ == "__main__":
    main()
