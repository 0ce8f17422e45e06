"""Check that the rows of a job's data are the same whenever and wherever they are fetched.

A row must be determined by its number and its random key. Bytes are fingerprinted at once, as a
data set may change an object after it has returned it.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.schema.json import check_json, dump_json
from stratagem.worker.data.datasets import Dataset, TensorDataset, at_the_base, map_tensors
from stratagem.worker.data.rows import BatchKeys, RowDataset, generators_kept, seed_generators
from stratagem.worker.data.stream_reader import StreamSource, opened, state_of
from stratagem.worker.data.streams import FetchedRows
from stratagem.worker.user_code.entrypoints import user_code

# ---- Rows fetched twice ----

_KEYS = BatchKeys(("row", "check"))


def check_purity(dataset: RowDataset) -> None:
    """Fetch two rows twice each. Raises InvalidInputError with the row and the leaf that differ."""
    last = dataset.num_rows - 1
    numbers = list(dict.fromkeys((0, last))) if last >= 0 else []
    with generators_kept():
        first, second = ({n: _fetched(dataset, n) for n in numbers} for _ in range(2))
    for number in numbers:
        row, refetched = first[number], second[number]
        differing = [leaf for leaf in row | refetched if row.get(leaf) != refetched.get(leaf)]
        if differing:
            raise InvalidInputError.at(
                f"data.{dataset.split}",
                f"row {number} is not the same when it is fetched again: {differing[0]} differs; "
                "draw from random, numpy.random or torch's default generator, which are seeded "
                "for each row, or set execution.deterministic: false",
            )


def _fetched(dataset: RowDataset, number: int) -> dict[str, str]:
    """Return a fingerprint of each leaf of a row, keyed by path."""
    return dict(leaves_of(dataset.row(number, _KEYS)))


def leaves_of(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (path, fingerprint) of each leaf of a row."""
    for path, leaf in values_of(value):
        yield path, fingerprint(leaf)


def values_of(value: Any, path: str = "the row") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each leaf of a row."""
    match value:
        case Mapping():
            for key, inner in value.items():
                yield from values_of(inner, f"{path}[{key!r}]")
        case tuple() | list():
            for place, inner in enumerate(value):
                yield from values_of(inner, f"{path}[{place}]")
        case _:
            yield path, value


def fingerprint(value: Any) -> str:
    """Return the type of a leaf and, if its value is visible, a digest of the value."""
    return f"{type(value).__name__} {_text(value)}"


def _text(value: Any) -> str:
    """Return the text of a leaf for comparison; empty for an object whose value is not visible."""
    match value:
        case Tensor():
            plain = value.detach().cpu().contiguous()
            data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
            return f"{plain.dtype} {tuple(plain.shape)} {_digest(data)}"
        case np.ndarray():
            return f"{value.dtype} {value.shape} {_digest(value.tobytes())}"
        case bool() | int() | float() | complex() | str() | bytes() | None | np.generic():
            return repr(value)
        case _:
            to_bytes = getattr(value, "tobytes", None)  # as images have
            return _digest(to_bytes()) if callable(to_bytes) else ""


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# ---- Rows of another process ----
#
# A few rows of each split are described, so that those of another process, or of another call of
# the function that makes them, can be compared with them. Floating-point values are rounded to
# three digits: a value that a data function computes from all rows, such as a mean, has other last
# bits on other processors. Streams, data sets with their own `take` and the rows of single clients
# are left out.

MAX_CHARS: Final = 8192
"""Maximum length of a description, which is journaled; a longer one is left out."""
_SAME_KEYS: Final = BatchKeys(("row", "same"))
_NUM_VALUES: Final = 4
"""Number of described values of each floating-point tensor, spread over all of it."""
_CELLS: Final = 10
"""The precision of described values, in bits relative to a tensor's largest value."""
_SMALLEST: Final = 1e-6
"""A lower bound of a tensor's largest value: smaller values count as rounding noise around 0."""
_ROUNDINGS: Final = ((1.0, 0.37), (math.sqrt(2.0), 0.81))
"""The scale and the offset (as a part of the rounding step) of two roundings, so that a value near
a rounding boundary of one is not near a boundary of the other."""

_Row = dict[str, list[str]]
"""The digests of a row, keyed by leaf (tensor or other single value). A tensor has its kind and one
digest per rounding, of which at least one must match on the other worker."""


class _Description(BaseModel):
    of: str
    splits: dict[str, dict[str, _Row]]


def described_rows(job: JobSpec, data: Mapping[str, Dataset]) -> str:
    """Describe some rows of each split as JSON, for comparison on other workers; return "" if the
    rows of other workers may rightly differ, or if the text is too long."""
    if job.data.entrypoint is None or not job.execution.deterministic:
        return ""
    splits = {split: dict(_rows_of(dataset)) for split, dataset in data.items()}
    text = _Description(of=_source_of(job), splits=splits).model_dump_json()
    return text if len(text) <= MAX_CHARS else ""


def check_same_rows(job: JobSpec, data: Mapping[str, Dataset], known: str, where: str) -> None:
    """Compare rows with those of the same function that `described_rows` has described elsewhere.

    where: completes "is not the same". Raises InvalidInputError, which names the row and the
    difference.
    """
    described = described_rows(job, data) if known else ""
    if not described:
        return
    before, now = _read(known), _read(described)
    if before.of != now.of:
        return
    for split, rows in before.splits.items():
        for number, row in rows.items():
            row_now = now.splits.get(split, {}).get(number)
            if row_now is not None and (differing := _differing(row, row_now)):
                raise _differs(split, number, differing, where)


def _read(text: str) -> _Description:
    """Decode the description made by another process; invalid text gives an empty one."""
    try:
        return _Description.model_validate_json(text)
    except ValidationError:
        return _Description(of="", splits={})


def _differs(split: str, number: str, leaf: str, where: str) -> InvalidInputError:
    return InvalidInputError.at(
        f"data.{split}",
        f"row {number} is not the same {where}: {leaf} differs; data.entrypoint must give the same "
        "rows on each worker and in each call: seed the generators that it makes, as in "
        "numpy.random.default_rng(0), or draw from random, numpy.random or torch's default "
        "generator, which are seeded before the call; execution.deterministic: false allows it",
    )


def _source_of(job: JobSpec) -> str:
    """Return a digest of everything that determines the rows of a data function."""
    code = None if job.code is None else job.code.digest
    source = {"seed": job.seed, "code": code, "entrypoint": job.data.entrypoint}
    whole = {**source, "kwargs": check_json(job.data.kwargs)}
    return hashlib.sha256(dump_json(whole).encode()).hexdigest()[:16]


def _rows_of(dataset: Dataset) -> Iterator[tuple[str, _Row]]:
    base, _ = at_the_base(dataset, torch.arange(0))
    if isinstance(base, RowDataset):
        for number in _numbers(base.num_rows, 2):
            with generators_kept():
                yield str(number), _described(base.row(number, _SAME_KEYS))
    elif isinstance(base, FetchedRows):
        yield from ((str(number), _described(row)) for number, row in enumerate(base.rows))
    elif isinstance(base, TensorDataset):
        for number in _numbers(base.num_rows, 3):
            row = (_row(base.x, number), _row(base.y, number))
            yield str(number), _described(row)


def _row(value: Any, number: int) -> Any:
    return map_tensors(value, lambda tensor: tensor[number])


def _numbers(num_rows: int, wanted: int) -> list[int]:
    """Return up to `wanted` row numbers: the first one, the last one, and some in between."""
    spread = (place * (num_rows - 1) // (wanted - 1) for place in range(wanted))
    return list(dict.fromkeys(spread)) if num_rows else []


def _described(row: Any) -> _Row:
    return {path: _leaf(value) for path, value in values_of(row)}


def _leaf(value: Any) -> list[str]:
    tensor = torch.from_numpy(np.asarray(value)) if isinstance(value, np.ndarray) else value
    if not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
        return [fingerprint(value)]
    flat = tensor.detach().reshape(-1)
    places = torch.tensor(_numbers(len(flat), _NUM_VALUES), dtype=torch.int64, device=flat.device)
    numbers = flat.index_select(0, places).double().tolist()
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    return [kind, *(_rounded(numbers, *rounding) for rounding in _ROUNDINGS)]


def _rounded(values: list[float], factor: float, offset: float) -> str:
    """Return a digest of rounded values, so that a description contains no value of the data."""
    largest = max([abs(x) for x in values if math.isfinite(x)] + [_SMALLEST])
    exponent = math.frexp(largest * factor)[1] - _CELLS
    size = math.ldexp(1.0, exponent)
    cells = [math.floor(x / size + offset) if math.isfinite(x) else str(x) for x in values]
    return hashlib.sha256(repr((exponent, cells)).encode()).hexdigest()[:16]


def _differing(row: _Row, again: _Row) -> str:
    """Return the path of a leaf that differs; "" if none does."""
    paths = (path for path in row | again if not _alike(row.get(path, []), again.get(path, [])))
    return next(paths, "")


def _alike(one: list[str], other: list[str]) -> bool:
    same = [x == y for x, y in zip(one, other, strict=False)]
    return len(one) == len(other) and all(same[:1]) and (len(one) == 1 or any(same[1:]))


# ---- Streams ----
#
# The first rows of a source must be the same when they are read again, and a state of the source
# must lead to exactly the rows that come next.

_NUM_ROWS: Final = 3


@dataclass(frozen=True, slots=True)
class _Read:
    """Fingerprints of the leaves of some rows, and the state of the source after the first row."""

    rows: list[dict[str, str]]
    state: str | None


def check_stream(source: StreamSource, split: str, *, is_pure: bool) -> bool:
    """Read the first rows of shard 0 several times; return whether reading can continue from a
    saved state of the source. is_pure: raise InvalidInputError, which names row and leaf, if two
    readings differ."""
    with generators_kept(), user_code(f"reading the first rows of data.{split}"):
        first, again = (_read_streams(opened(source, 0, 0, None), 0) for _ in range(2))
        if is_pure:
            _compare(first.rows, again.rows, split)
        if first.state is None:
            return False
        went_on = _read_streams(opened(source, 0, 0, first.state), 1)
        return went_on.rows == first.rows[1:] and _begins_anew(source, first)


def _begins_anew(source: StreamSource, first: _Read) -> bool:
    """Return whether a source begins at its first row again when it is opened again."""
    return _read_streams(opened(source, 0, 0, None), 0).rows == first.rows


def _read_streams(rows: Iterable[object], first: int) -> _Read:
    """Fingerprint the rows from number `first` on, each read with its seed."""
    iterator, read_rows = iter(rows), []
    state = None
    for row in range(first, _NUM_ROWS):
        seed_generators(row)
        leaves = (dict(leaves_of(item)) for item in islice(iterator, 1))
        read_rows.append(next(leaves, {}))
        state = state_of(rows) if row == 0 else state
    return _Read(read_rows, state)


def _compare(first: list[dict[str, str]], again: list[dict[str, str]], split: str) -> None:
    for row, (one, other) in enumerate(zip(first, again, strict=True)):
        differing = [leaf for leaf in one | other if one.get(leaf) != other.get(leaf)]
        if differing:
            raise InvalidInputError.at(
                f"data.{split}",
                f"row {row} of a stream is not the same when it is read again: {differing[0]} "
                "differs; iter() must begin anew whenever it is called, and rows may draw from "
                "random, numpy.random or torch's default generator, which are seeded for each; or "
                "set execution.deterministic: false",
            )
