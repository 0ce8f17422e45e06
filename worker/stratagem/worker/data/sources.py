"""Load the data that a job names: an entry point, a file, tensors of the caller, or local data.

The module defines the form of each kind of source and, for federated jobs, the rows that one client
may use. It knows neither batches nor models nor the network.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError, NotFoundError, UserCodeError
from stratagem.common.job import DataSpec, JobSpec, PartitionSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.numerics.shards import split_rows
from stratagem.common.strategy import Federated
from stratagem.worker.data.checks import check_purity, check_same_rows, described_rows
from stratagem.worker.data.datasets import Dataset, Readers, Subset, tensor_dataset
from stratagem.worker.data.factory import DataFunction, check_streams, made_data, stream_of
from stratagem.worker.data.rows import RowDataset
from stratagem.worker.data.streams import StreamDataset, StreamedSplit
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code

# ---- Data sources ----

LocalData = Callable[[int | None], Mapping[str, Dataset]]
"""Loads the worker's local data by split, given the job's seed or None."""
MAX_CLIENTS_KEPT: Final = 64
"""Maximum number of cached data sets of single clients, if the factory makes one per client."""
SEEDED_FACTORIES: Final = 3
"""The first version of `numerics` that seeds generators before the entry point is called."""


@dataclass(frozen=True, slots=True)
class ClientShare:
    """One client of a federated run: its number, and the number of clients."""

    number: int
    num_clients: int


@dataclass(frozen=True, slots=True)
class DataSources:
    """The data that operator and caller provide: local files and inline tensors, by name.

    loaders: load the local data defined by the site's file. readers: processes that fetch rows;
    None without any.
    """

    worker_local: Mapping[str, str | Path] = field(default_factory=dict)
    loaders: Mapping[str, LocalData] = field(default_factory=dict)
    inline: Mapping[str, Tensor] | None = None
    known_rows: str = ""
    """Description of rows by the worker that built the model; "" if there is none."""
    roots: tuple[Path, ...] | None = None
    """The folders in which `data.path` must be; None if the caller's process reads it."""
    readers: Readers | None = None


def load_data(
    job: JobSpec,
    entrypoints: EntryPoints,
    sources: DataSources,
    client: ClientShare | None = None,
    numerics: int = CURRENT,
) -> dict[str, Dataset]:
    """Return the job's data sets by split; for a client, only its training rows.

    numerics: version of the rules that fix results bit for bit; see common.numerics.rules.
    """
    spec, partition = job.data, job.partition
    if client is None and partition is not None and partition.client is not None:
        client = ClientShare(partition.client, partition.num_clients or 1)
    if spec.entrypoint is not None:
        return _from_entrypoint(job, entrypoints, sources, client, numerics)
    if spec.worker_local is not None:
        # Local data is the client's own already.
        if spec.worker_local in sources.loaders:
            seed = job.seed if numerics >= SEEDED_FACTORIES else None
            local_splits = dict(sources.loaders[spec.worker_local](seed))
            _check_kinds(job, local_splits)
            return local_splits
        return read_tensors(_local_path(spec.worker_local, sources), "data.worker_local")
    if spec.inline is not None:
        if sources.inline is None:
            raise NotFoundError(f"the inline data {spec.inline} of the job is not on this worker")
        splits = from_tensors(sources.inline)
    else:
        splits = from_tensors(_read(_job_path(spec, sources), "data.path"))
    return _own_rows(job, splits, client)


class ClientData:
    """The data of any client of one job. Shared data are loaded and divided once; data that a
    factory makes for each client are cached for the last clients."""

    def __init__(
        self,
        job: JobSpec,
        entrypoints: EntryPoints,
        sources: DataSources,
        numerics: int = CURRENT,
    ) -> None:
        self._job, self._entrypoints, self._sources = job, entrypoints, sources
        self._numerics = numerics
        self._shared: dict[str, Dataset] | None = None
        self._rows: dict[int, list[Tensor]] = {}  # by number of clients
        self._by_client: OrderedDict[ClientShare, dict[str, Dataset]] = OrderedDict()

    def of(self, client: ClientShare) -> dict[str, Dataset]:
        """Return the data sets that this client may use, keyed by split."""
        if self.is_made_per_client:
            return self._made_for(client)
        if self._shared is None:
            self._shared = self._load(None)
        if self._job.data.worker_local is not None or "train" not in self._shared:
            return self._shared
        train = self._shared["train"]
        if isinstance(train, StreamDataset):
            stream = train.of_client(client.number, client.num_clients)
            return {**self._shared, "train": stream}
        if client.num_clients not in self._rows:
            self._rows[client.num_clients] = _divided(self._job, train, client.num_clients)
        rows = self._rows[client.num_clients][client.number]
        return {**self._shared, "train": Subset(train, rows)}

    @cached_property
    def is_made_per_client(self) -> bool:
        """True if the function that makes the data gets the client's number."""
        # Cached, as the look-up of the entry point is a third of a round with very short training.
        spec = self._job.data
        if spec.entrypoint is None:
            return False
        factory = self._entrypoints.bind(spec.entrypoint, spec.kwargs, "data")
        return bool(_client_arguments(factory, ClientShare(0, 1)))

    def _made_for(self, client: ClientShare) -> dict[str, Dataset]:
        if client not in self._by_client:
            if len(self._by_client) >= MAX_CLIENTS_KEPT:
                self._by_client.popitem(last=False)
            self._by_client[client] = self._load(client)
        self._by_client.move_to_end(client)
        return self._by_client[client]

    def _load(self, client: ClientShare | None) -> dict[str, Dataset]:
        return load_data(self._job, self._entrypoints, self._sources, client, self._numerics)


def _job_path(spec: DataSpec, sources: DataSources) -> Path:
    """Return the path that a job names, which must be in a folder that the operator allows."""
    if spec.path is None:
        raise InvalidInputError.at("data", "names no source")
    if sources.roots is None:
        return Path(spec.path)
    path = Path(spec.path).resolve()  # symbolic links lead nowhere else
    if not any(path.is_relative_to(root) for root in sources.roots):
        allowed = ", ".join(map(str, sources.roots)) or "none"
        reason = f"{spec.path!r} is in no data folder of this worker (--data-root): "
        raise InvalidInputError.at("data.path", reason + allowed)
    return path


def _from_entrypoint(
    job: JobSpec,
    entrypoints: EntryPoints,
    sources: DataSources,
    client: ClientShare | None,
    numerics: int,
) -> dict[str, Dataset]:
    name = job.data.entrypoint
    assert name is not None
    factory = entrypoints.bind(name, job.data.kwargs, "data")
    wanted = _client_arguments(factory, client)
    function = DataFunction(name, job.data.kwargs, job.data.collate)
    seed = job.seed if numerics >= SEEDED_FACTORIES else None
    shares = _shares_of_clients(job, factory) if client is None else ()
    splits = _with_rows(
        lambda given: made_data(function, entrypoints, given, seed),
        wanted,
        shares,
        is_evaluated=job.evaluation is not None,
    )
    splits = {
        split: stream_of(dataset, job) if isinstance(dataset, StreamedSplit) else dataset
        for split, dataset in splits.items()
    }
    _check_kinds(job, splits)
    if wanted:
        return splits
    check_same_rows(job, splits, sources.known_rows, "as on the worker that has built the model")
    return _own_rows(job, splits, client)


def _shares_of_clients(job: JobSpec, factory: Callable[..., Any]) -> Iterable[dict[str, int]]:
    """Return the arguments (client number and count) of the data function for each client of a
    federation, in order; none if the function takes neither."""
    if not isinstance(job.strategy, Federated) or not _client_arguments(factory, ClientShare(0, 1)):
        return ()
    count = job.strategy.num_clients
    return (_client_arguments(factory, ClientShare(number, count)) for number in range(count))


def _with_rows(
    made: Callable[[Mapping[str, int]], dict[str, Dataset]],
    given: Mapping[str, int],
    others: Iterable[Mapping[str, int]],
    *,
    is_evaluated: bool,
) -> dict[str, Dataset]:
    """Make the data sets for the arguments `given`. If they have no training rows, which is not an
    error, take the training rows of the first of `others` for which there are any.

    is_evaluated: the other splits are needed as made for `given`, so errors in making them are
    raised.
    """
    splits, failure = dict[str, Dataset](), None
    try:
        splits = made(given)
    except (UserCodeError, InvalidInputError) as error:
        if is_evaluated:
            raise
        failure = error
    if _has_rows(splits):
        return splits
    for other in others:
        with suppress(UserCodeError, InvalidInputError):
            other_splits = made(other)
            if _has_rows(other_splits):
                return {**other_splits, **splits, "train": other_splits["train"]}
    if failure is not None:
        raise failure
    return splits


def _has_rows(splits: Mapping[str, Dataset]) -> bool:
    train = splits.get("train")
    return train is not None and (isinstance(train, StreamedSplit) or len(train) > 0)


def rows_to_compare(
    job: JobSpec, entrypoints: EntryPoints, data: Mapping[str, Dataset], numerics: int
) -> str:
    """Describe rows of loaded data, for comparison on other workers; "" if the data are one
    client's, or were made without seeding."""
    name = job.data.entrypoint
    if name is None or numerics < SEEDED_FACTORIES:
        return ""
    if _client_arguments(entrypoints.bind(name, job.data.kwargs, "data"), None):
        return ""
    return described_rows(job, data)


def _check_kinds(job: JobSpec, splits: Mapping[str, Dataset]) -> None:
    """Raise InvalidInputError for settings that the kind of data set does not have, and for rows
    that differ when they are read twice."""
    streams = [split for split, dataset in splits.items() if isinstance(dataset, StreamDataset)]
    check_streams(job, streams)
    by_row = [split for split, dataset in splits.items() if isinstance(dataset, RowDataset)]
    for key in ("collate", "readers"):
        if getattr(job.data, key) and not by_row and not streams:
            raise InvalidInputError.at(
                f"data.{key}",
                "belongs to data sets with len() and [row]; the entry point gives none",
            )
    if job.execution.memory == "Cached" and by_row:
        raise InvalidInputError.at(
            "execution.memory",
            f"Cached reads each row once, but those of data.{by_row[0]} are fetched one by one "
            "and may differ in each epoch; leave it out, or give a tuple (x, y) of tensors",
        )
    if job.execution.deterministic:
        for dataset in splits.values():
            if isinstance(dataset, RowDataset):
                check_purity(dataset)


def _client_arguments(factory: Callable[..., Any], client: ClientShare | None) -> dict[str, int]:
    """Return the client's number and the number of clients as arguments, if the factory takes them.

    Outside of a client's round a factory uses its defaults; one without defaults makes the data of
    client 0 of 1, and if these have no rows, `_with_rows` looks for others.
    """
    parameters = inspect.signature(factory).parameters
    share = client or ClientShare(0, 1)
    values = {"client_id": share.number, "num_clients": share.num_clients}
    return {
        name: value
        for name, value in values.items()
        if name in parameters
        and (client is not None or parameters[name].default is inspect.Parameter.empty)
    }


def _own_rows(
    job: JobSpec, splits: dict[str, Dataset], client: ClientShare | None
) -> dict[str, Dataset]:
    """Keep only the client's rows of the training split."""
    if client is None or "train" not in splits:
        return splits
    train = splits["train"]
    if isinstance(train, StreamDataset):
        return {**splits, "train": train.of_client(client.number, client.num_clients)}
    rows = _divided(job, train, client.num_clients)
    return {**splits, "train": Subset(train, rows[client.number])}


def _divided(job: JobSpec, train: Dataset, num_clients: int) -> list[Tensor]:
    """Return the row numbers of each client, as the job partitions the training split."""
    labels = None
    if job.partition is not None and job.partition.method != "contiguous":
        with user_code("reading labels"):
            labels = (
                train.labels()
                if isinstance(train, RowDataset)
                else train.take(torch.arange(len(train)))[1]
            )
        labels = torch.as_tensor(labels) if labels is not None else None
    partition = job.partition
    seed = job.seed if partition is None or partition.seed is None else partition.seed
    return client_rows(partition, labels, len(train), num_clients, seed)


def _local_path(name: str, sources: DataSources) -> Path:
    if name not in sources.worker_local:
        names = ", ".join(sorted(sources.worker_local)) or "none"
        raise NotFoundError(f'data.worker_local: this worker has no "{name}"; it has: {names}')
    return Path(sources.worker_local[name])


def read_tensors(path: Path, where: str) -> dict[str, Dataset]:
    """Return the data sets of a file, by split. Raises InvalidInputError or NotFoundError, which
    name the field `where`."""
    return from_tensors(_read(path, where))


def _read(path: Path, where: str) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise NotFoundError(f"{where}: no file {path}") from error
    except (SafetensorError, OSError) as error:
        raise InvalidInputError.at(where, f"{path} is not a safetensors file: {error}") from error


def from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Dataset]:
    """Return the data sets of tensors by name: `train.x` and `train.y` make a split; nested names
    `train.x.<key>` become dicts."""
    nested: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        split, _, path = name.partition(".")
        side, _, key = path.partition(".")
        if side not in ("x", "y"):
            raise InvalidInputError.at("data", f'tensor "{name}" is not named <split>.x or .y')
        sides = nested.setdefault(split, {})
        if key:
            sides.setdefault(side, {})[key] = tensor
        else:
            sides[side] = tensor
    return {
        split: tensor_dataset(sides.get("x"), sides.get("y"), split)
        for split, sides in nested.items()
    }


# ---- Partition among simulated clients ----
#
# Every method gives each row to exactly one client and depends on its arguments only, which are
# labels and counts.

_LABELS_PER_CLIENT = 2

Rows: TypeAlias = NDArray[np.int64]


def contiguous(num_rows: int, num_clients: int) -> list[Tensor]:
    """Return consecutive ranges of rows whose sizes differ by at most one."""
    pieces = split_rows(num_rows, num_clients)
    return [torch.arange(piece.start, piece.stop) for piece in pieces]


def by_label(labels: Tensor, num_clients: int, labels_per_client: int, seed: int) -> list[Tensor]:
    """Return the rows of clients by label: rows are sorted by label and cut into equal pieces, of
    which each client gets `labels_per_client`."""
    order = torch.sort(labels, stable=True).indices
    pieces = split_rows(len(labels), num_clients * labels_per_client)
    deal = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed)).tolist()
    parts = []
    for client in range(num_clients):
        hand = deal[client * labels_per_client : (client + 1) * labels_per_client]
        rows = [order[pieces[piece].start : pieces[piece].stop] for piece in hand]
        parts.append(torch.cat(rows).sort().values)
    return parts


def dirichlet(labels: Tensor, num_clients: int, alpha: float, seed: int) -> list[Tensor]:
    """Return the rows of each label split in proportions drawn from Dirichlet(alpha).

    A client that would be left without rows takes one from the largest client.
    """
    generator = np.random.default_rng(seed)
    values = labels.numpy()
    parts: list[list[Rows]] = [[] for _ in range(num_clients)]
    for label in np.unique(values):
        rows = generator.permutation(np.flatnonzero(values == label))
        shares = generator.dirichlet(np.full(num_clients, alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    none = np.empty(0, np.int64)  # there may be no labels at all
    merged = [np.sort(np.concatenate([none, *part])) for part in parts]
    return [torch.from_numpy(rows) for rows in _without_empty(merged)]


def _without_empty(parts: list[Rows]) -> list[Rows]:
    for client, rows in enumerate(parts):
        largest = max(range(len(parts)), key=lambda index: len(parts[index]))
        if len(rows) == 0 and len(parts[largest]) > 1:
            parts[client], parts[largest] = parts[largest][:1], parts[largest][1:]
    return parts


def client_rows(
    partition: PartitionSpec | None,
    labels: Tensor | None,
    num_rows: int,
    num_clients: int,
    seed: int,
) -> list[Tensor]:
    """Return the rows of every client. `labels` may be None if the method needs none."""
    if partition is None or partition.method == "contiguous":
        return contiguous(num_rows, num_clients)
    if labels is None or labels.dim() != 1 or labels.is_floating_point():
        raise InvalidInputError.at(
            "partition.method",
            f'"{partition.method}" needs one integer label per row; "contiguous" does not',
        )
    if partition.method == "by_label":
        per_client = partition.labels_per_client or _LABELS_PER_CLIENT
        return by_label(labels, num_clients, per_client, seed)
    return dirichlet(labels, num_clients, partition.alpha, seed)
