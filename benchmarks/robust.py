"""Seconds of a fold under each robust rule, beside the weighted mean of the same updates.

    python benchmarks/robust.py --parameters 10000000 --clients 10 40 --repeats 5

Updates of float32 lie in spools, as a round leaves them; each fold reads them, combines them, and
hashes, writes and syncs the next state. Of rules that compare whole updates the verdict is timed
with it. Rules take turns, so that what else the machine does meets them alike; medians are shown,
and how often the mean's time they take.
"""

import argparse
import resource
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from stratagem.common.base.ids import Digest, Party, RunId
from stratagem.common.strategy import (
    Bulyan,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormBound,
    RobustRule,
    TrimmedMean,
    fewest_updates,
    is_judged,
)
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import Manifest, Purpose, build_manifest
from stratagem.coordinator.store.blobs import DirectoryBlobs
from stratagem.coordinator.updates.fold import fold_weighted_mean
from stratagem.coordinator.updates.reading import WholeSource, open_state
from stratagem.coordinator.updates.robust import combination, judge, places_read
from stratagem.coordinator.updates.spool import Spool, SpoolKey, SpoolRun
from stratagem.coordinator.updates.upload import SpoolEntry

PIECE = 1 << 20
QUOTA = 1 << 40


def rules(num_clients: int) -> dict[str, RobustRule | None]:
    """Every rule that so many updates suffice for, beside the mean."""
    false = (num_clients - 3) // 4
    found: dict[str, RobustRule | None] = {
        "mean": None,
        "median": Median(),
        "trimmed_mean": TrimmedMean(0.2),
        "krum": Krum(false),
        "multi_krum": MultiKrum(false),
        "bulyan": Bulyan(false),
        "geometric_median": GeometricMedian(),
        "norm_bound": NormBound(1.0),
    }
    return {name: rule for name, rule in found.items() if fewest_updates(rule) <= num_clients}


class SpooledRound:
    """The updates of a round in a folder, and the state that they began from."""

    def __init__(self, folder: Path, num_parameters: int, num_clients: int) -> None:
        layout = [("weight", "float32", (num_parameters,))]
        self.manifest = build_manifest(layout, Purpose.UPDATE)
        self.store = DirectoryBlobs(folder / "blobs")
        spool = Spool(folder / "spool", quota_bytes=QUOTA)
        self.base = self._base(num_parameters)
        self.entries = [self._update(spool, client) for client in range(num_clients)]

    def seconds(self, rule: RobustRule | None) -> float:
        """Of one fold, with the verdict before it."""
        began = time.perf_counter()
        with ExitStack() as files:
            _, state = open_state(files, self.store, self.base)
            if rule is None:
                self._fold(self.entries, None)
            else:
                weights: tuple[float, ...] = ()
                if is_judged(rule):
                    sources = [WholeSource(entry) for entry in self.entries]
                    weights = judge(rule, sources, self.manifest, state, lambda: None).weights
                places = places_read(rule, len(self.entries), weights)
                counted = [weights[place] if weights else 1.0 for place in places]
                read = [self.entries[place] for place in places]
                self._fold(read, combination(rule, counted, state))
        return time.perf_counter() - began

    def _fold(self, entries: list[SpoolEntry], combined: object) -> None:
        writer = self.store.writer(len(header_bytes(self.manifest)) + self.manifest.total_bytes)
        folded = fold_weighted_mean(
            entries,
            [1.0] * len(entries),
            self.manifest,
            writer,
            combination=combined,  # type: ignore[arg-type]
        )
        self.store.path(folded.state).unlink()

    def _base(self, num_parameters: int) -> Digest:
        writer = self.store.writer(len(header_bytes(self.manifest)) + self.manifest.total_bytes)
        writer.write(header_bytes(self.manifest))
        for start in range(0, num_parameters, PIECE):
            writer.write(np.zeros(min(PIECE, num_parameters - start), "<f4").view(np.uint8).data)
        return writer.commit()

    def _update(self, spool: Spool, client: int) -> SpoolEntry:
        random = np.random.default_rng(client)
        key = SpoolKey(SpoolRun(RunId("benchmark")), Party(""), 1, client)
        manifest: Manifest = self.manifest
        num_left = manifest.total_bytes // 4
        writer = spool.open(key, manifest)
        while num_left:
            piece = random.standard_normal(min(PIECE, num_left), np.float32)
            writer.write(piece.view(np.uint8).data)
            num_left -= len(piece)
        return writer.commit(manifest, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 40])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for num_clients in options.clients:
        with tempfile.TemporaryDirectory() as folder:
            spooled = SpooledRound(Path(folder), options.parameters, num_clients)
            times: dict[str, list[float]] = {name: [] for name in rules(num_clients)}
            for _ in range(options.repeats):
                for name, rule in rules(num_clients).items():
                    times[name].append(spooled.seconds(rule))
        mean = statistics.median(times["mean"])
        print(f"{num_clients} clients of {options.parameters:,} float32")
        for name, found in times.items():
            middle = statistics.median(found)
            print(f"  {name:18} {middle:7.2f} s  {middle / mean:5.1f} × the mean")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of the process {peak:.0f} MiB")


if __name__ == "__main__":
    main()
