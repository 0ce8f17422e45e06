"""Rows per second of an image pipeline: reader processes against torch's DataLoader, side by side.

    python benchmarks/readers.py --repetitions 5

A row is a JPEG of 256 x 256 that is decoded with Pillow, cropped to 224 x 224 at random and perhaps
flipped; 64 make a batch. Both sides have equally many processes, read equally far ahead, and live
for all repetitions, in which they take turns; printed are the medians, and the median of the ratios
within a repetition. Readers draw from generators that are seeded for each row, the DataLoader does
not. CPU time is that of all processes of a side; it means something on a busy machine, too. "First
batch" is the time from starting the processes to the first batch, with what the readers
import; the DataLoader forks this process, which has imported everything.
"""

import argparse
import io
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from stratagem.worker.data.datasets import Gather
from stratagem.worker.data.factory import DataFunction, made_data
from stratagem.worker.data.reader_batches import ReaderSetup
from stratagem.worker.data.readers import ReaderPool
from stratagem.worker.data.rows import BatchKeys
from stratagem.worker.user_code.entrypoints import EntryPoints

SIDE = 256
CROP = 224
NUM_IMAGES = 1024
BATCH = 64
PREFETCH = 2
ENTRYPOINTS = EntryPoints(["benchmarks.readers:*"], [Path(__file__).parents[1]])

Batches = Iterator[Any]


class Images(Dataset[tuple[Tensor, int]]):
    """Photographs of noise, on disk."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).iterdir())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        image = Image.open(self.files[row]).convert("RGB")
        left, top = random.randint(0, SIDE - CROP), random.randint(0, SIDE - CROP)
        image = image.crop((left, top, left + CROP, top + CROP))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels, row % 10


def load(folder: str) -> dict[str, Images]:
    return {"train": Images(folder)}


def make_images(folder: Path) -> None:
    draw = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        coarse = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        data = io.BytesIO()
        Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(data, "JPEG")
        (folder / f"{number:05d}.jpg").write_bytes(data.getvalue())


def function_of(folder: str) -> DataFunction:
    return DataFunction("benchmarks.readers:load", {"folder": folder}, None)


@contextmanager
def of_readers(folder: str, num_processes: int) -> Iterator[Batches]:
    function = function_of(folder)
    dataset = made_data(function, ENTRYPOINTS, {}, 0)["train"]
    pool = None
    if num_processes:
        pool = ReaderPool(ReaderSetup(function, 0, ENTRYPOINTS), num_processes, PREFETCH)
    gather = Gather(torch.float32, torch.device("cpu"), readers=pool)

    def coming() -> Iterator[tuple[Any, Tensor, BatchKeys]]:
        step = 0
        while True:
            for indices in torch.split(torch.randperm(NUM_IMAGES), BATCH):
                yield dataset, indices, BatchKeys((0, "row", 0), (0, step, 0, 0))
                step += 1

    def batches() -> Batches:
        torch.manual_seed(0)
        orders = list(zip(coming(), range(4096), strict=False))
        gather.expect(order for order, _ in orders)
        for (of, indices, keys), _ in orders:
            yield gather(of, indices, "reading", keys)

    try:
        yield batches()
    finally:
        if pool is not None:
            pool.stop()


@contextmanager
def of_loader(folder: str, num_processes: int) -> Iterator[Batches]:
    loader: DataLoader[Any] = DataLoader(
        Images(folder),
        BATCH,
        shuffle=True,
        num_workers=num_processes,
        multiprocessing_context=multiprocessing.get_context("fork") if num_processes else None,
        prefetch_factor=PREFETCH if num_processes else None,
        persistent_workers=bool(num_processes),
    )

    def batches() -> Batches:
        while True:
            yield from loader

    yield batches()


SIDES: dict[str, Callable[[str, int], Any]] = {"DataLoader": of_loader, "readers": of_readers}


def rows_per_s(batches: Batches, num_batches: int) -> float:
    next(batches)
    started_s = time.perf_counter()
    for _ in range(num_batches):
        next(batches)
    return num_batches * BATCH / (time.perf_counter() - started_s)


def cpu_s(helpers: set[psutil.Process]) -> float:
    """Returns what this process and its helpers have computed."""
    times = [psutil.Process().cpu_times(), *(each.cpu_times() for each in helpers)]
    return sum(each.user + each.system for each in times)


def compare(folder: str, num_processes: int, repetitions: int, num_batches: int) -> None:
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    cpu_ms: dict[str, list[float]] = {name: [] for name in SIDES}
    first_s = {}
    with ExitStack() as opened:
        sources, helpers, all_before = {}, {}, set(psutil.Process().children(recursive=True))
        for name, make in SIDES.items():
            started_s = time.perf_counter()
            sources[name] = opened.enter_context(make(folder, num_processes))
            next(sources[name])
            first_s[name] = time.perf_counter() - started_s
            helpers[name] = set(psutil.Process().children(recursive=True)) - all_before
            all_before |= helpers[name]
        for repetition in range(repetitions):
            names = list(SIDES) if repetition % 2 else list(reversed(SIDES))
            for name in names:
                before_s = cpu_s(helpers[name])
                rates[name].append(rows_per_s(sources[name], num_batches))
                spent_s = cpu_s(helpers[name]) - before_s
                cpu_ms[name].append(1e3 * spent_s / ((num_batches + 1) * BATCH))
    ratios = [
        own / theirs for own, theirs in zip(rates["readers"], rates["DataLoader"], strict=True)
    ]
    print(
        f"{num_processes:9}  {statistics.median(rates['DataLoader']):10,.0f}"
        f"  {statistics.median(rates['readers']):7,.0f}  {statistics.median(ratios):5.2f}"
        f"  ({min(ratios):.2f} to {max(ratios):.2f})"
        f"  {statistics.median(cpu_ms['DataLoader']):10.3f}"
        f"  {statistics.median(cpu_ms['readers']):7.3f}"
        f"  {first_s['DataLoader']:10.2f}  {first_s['readers']:7.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--batches", type=int, default=24)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder))
        print(f"{'':11}{'rows/s':42}{'CPU ms per row':21}first batch, s")
        names = "DataLoader  readers"
        print(f"processes  {names}  ratio                 {names}  {names}")
        for number in arguments.processes:
            compare(folder, number, arguments.repetitions, arguments.batches)


if __name__ == "__main__":
    main()
