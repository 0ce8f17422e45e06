"""How fast states go into a folder and into an S3 bucket, and out again.

    python benchmarks/blob_stores.py [--mb 100] [--repeats 3] [--url s3://BUCKET/PREFIX]

`bytes alone` is the same traffic without files and digests: what the server and the connection can
do. Without --url the server is moto's, on loopback, which is written in Python and made for tests,
and copies the whole object for each part that is read; with it, what the AWS_* variables name. The
rows take turns. RSS is the growth of this process at its highest, which must not depend on --mb.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `tests`

from stratagem.common.base.ids import Digest
from stratagem.coordinator.store.blobs import BlobStore, DirectoryBlobs
from stratagem.coordinator.store.bucket import Objects, StoredObject, open_s3
from stratagem.coordinator.store.shared_blobs import BlobCache, SharedBlobs
from tests.worker.pipeline.s3_server import s3_server

PIECE = os.urandom(1 << 20)
Row = dict[str, float]


class Peak:
    """The largest memory of this process while it is watched, over what it was before."""

    def __init__(self) -> None:
        self.grown_mb = 0.0
        self._is_over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        process = psutil.Process()
        before = process.memory_info().rss

        def watch() -> None:
            while not self._is_over.wait(0.01):
                grown = process.memory_info().rss - before
                self.grown_mb = max(self.grown_mb, grown / 2**20)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()


def put(store: BlobStore, mb: int, number: int) -> Digest:
    writer = store.writer(mb << 20)
    writer.write(number.to_bytes(8, "little") + PIECE[8:])
    for _ in range(mb - 1):
        writer.write(PIECE)
    return writer.commit()


def get(store: BlobStore, digest: Digest) -> None:
    with store.open(digest) as file:
        while file.read(1 << 20):
            pass


def timed(act: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    act()
    return time.perf_counter() - started_s


def measure(open_store: Callable[[], BlobStore], mb: int, number: int) -> Row:
    """Seconds, and MB of memory. Each store that is opened is one on another machine."""
    peak, store, digests = Peak(), open_store(), []
    with peak.watched():
        row = {"put": timed(lambda: digests.append(put(store, mb, number)))}
        other = open_store()
        row["get"] = timed(lambda: get(other, digests[0]))
        row["again"] = timed(lambda: get(other, digests[0]))
    store.collect((), grace_s=0)
    return row | {"rss": peak.grown_mb}


def measure_bytes(objects: Objects, mb: int) -> Row:
    """What the server and the connection can do: no file, no digest."""
    row = {"put": timed(lambda: objects.put("raw", (PIECE for _ in range(mb)), mb << 20))}
    row["get"] = timed(lambda: sum(map(len, objects.read(StoredObject("raw", mb << 20)))))
    objects.delete(["raw"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--url", default="")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = options.url or "s3://benchmark/blobs"
        if not options.url:
            endpoint = stack.enter_context(s3_server("benchmark"))
            os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}
            os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        objects, terms = open_s3(url, os.environ), count(1)
        show(options, rows(options, folder, objects, terms))


def rows(
    options: Any, folder: Path, objects: Objects, terms: Iterator[int]
) -> dict[str, list[Row]]:
    def shared() -> SharedBlobs:
        term = next(terms)
        return SharedBlobs(objects, BlobCache(folder / f"cache{term}", 1 << 40), term)

    found: dict[str, list[Row]] = {"folder": [], "bucket": [], "bytes alone": []}
    for number in range(options.repeats):
        local = folder / f"blobs{number}"
        found["folder"].append(measure(partial(DirectoryBlobs, local), options.mb, number))
        found["bucket"].append(measure(shared, options.mb, number))
        found["bytes alone"].append(measure_bytes(objects, options.mb))
    return found


def show(options: Any, found: dict[str, list[Row]]) -> None:
    print("| | put MB/s | first get MB/s | get of a copy MB/s | RSS MB |\n|---|---|---|---|---|")
    for name, each in found.items():
        cells = [
            f"{options.mb / statistics.median(row[key] for row in each):.0f}"
            if key in each[0]
            else ""
            for key in ("put", "get", "again")
        ]
        rss = f"{max(row['rss'] for row in each):.0f}" if "rss" in each[0] else ""
        print(f"| {name} | {' | '.join(cells)} | {rss} |")


if __name__ == "__main__":
    main()
