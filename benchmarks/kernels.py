"""Bandwidth of each operator of `stratagem.worker.kernels` beside a copy on the same device.

    python benchmarks/kernels.py --numel 16777216

On a CUDA device the Triton programs against a device-to-device copy; without one the torch
reference against a copy in memory. Bytes are those that must be read or written once: a GB/s equal
to the copy's is all that a device can give. Median of the rounds; operators take turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from stratagem.worker import kernels
from stratagem.worker.kernels.ops import backend

Case = tuple[str, float, Callable[[], object]]
"""(what, bytes per element, the call)"""


def cases(numel: int, device: torch.device) -> list[Case]:
    x = torch.randn(numel, device=device)
    target, rest, copied = torch.zeros_like(x), torch.empty_like(x), torch.empty_like(x)
    codes = kernels.quantise_deterministic(x, 1.0)
    size = 1 << max(0, (numel // 16).bit_length() - 1)
    short = kernels.sketch(x, size, 0)
    return [
        ("copy", 8, lambda: copied.copy_(x)),
        ("signs", 4, lambda: kernels.signs(0, numel, device)),
        ("sum of magnitudes", 4, lambda: kernels.sum_magnitudes(x, threshold=1.0)),
        ("dot", 8, lambda: kernels.dot(x, copied)),
        ("quantise, threshold", 4.25, lambda: kernels.quantise_deterministic(x, 1.0)),
        (
            "quantise, threshold, rest",
            8.25,
            lambda: kernels.quantise_deterministic(x, 1.0, rest=rest),
        ),
        ("quantise, stochastic", 4.25, lambda: kernels.quantise_stochastic(x, 1.0, 0)),
        ("unpack", 4.25, lambda: kernels.unpack(codes, numel)),
        ("unpack and add", 8.25, lambda: kernels.unpack_add(target, codes, 0.1)),
        ("sketch to a 16th", 4 + 4 * size / numel, lambda: kernels.sketch(x, size, 0)),
        ("unsketch", 4 + 4 * size / numel, lambda: kernels.unsketch(short, numel, 0)),
    ]


def seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    rows = cases(args.numel, device)
    times_s: dict[str, list[float]] = {name: [] for name, _, _ in rows}
    for number in range(args.rounds + 1):
        for name, _, call in rows:
            took_s = seconds(call, device)
            if number:  # the first compiles, and touches new memory
                times_s[name].append(took_s)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    who = backend(device).__name__.rsplit(".", 1)[-1]  # type: ignore[attr-defined]
    print(f"{who} on {where}, {args.numel} elements, {torch.get_num_threads()} threads")
    if who == "reference":
        print("the Triton programs are not measured: they need a CUDA device and triton")
    copy_rate = 0.0
    for name, bytes_per_element, _ in rows:
        took_s = statistics.median(times_s[name])
        rate = bytes_per_element * args.numel / took_s / 1e9
        copy_rate = copy_rate or rate
        print(f"{name:<30} {1e3 * took_s:9.3f} ms {rate:8.2f} GB/s {rate / copy_rate:6.2f} of copy")


if __name__ == "__main__":
    main()
