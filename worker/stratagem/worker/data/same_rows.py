"""Describes a few rows of each split, so that those of another process, or of another call of the
function that makes them, can be compared with them.

Floating-point values are rounded to three digits: what a data function computes from all rows,
such as a mean, has other last bits on other processors. Streams, data sets with a `take` of their
own and the rows of single clients are left out. Must not know workers.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.schema.json import check_json, dump_json
from stratagem.worker.data.datasets import Dataset, TensorDataset, at_the_base, map_tensors
from stratagem.worker.data.generators import generators_kept
from stratagem.worker.data.purity_check import fingerprint, values_of
from stratagem.worker.data.row_datasets import BatchKeys, RowDataset
from stratagem.worker.data.stream_dataset import FetchedRows

MAX_CHARS: Final = 8192
"""Of a description, which is journaled; of longer ones nothing is compared."""
_SAME_KEYS: Final = BatchKeys(("row", "same"))
_NUM_VALUES: Final = 4
"""Of each floating-point tensor of a row, from all over it."""
_CELLS: Final = 10
"""Bits to which these values are rounded, of the largest of them."""
_SMALLEST: Final = 1e-6
"""Of the largest of them, as it is counted: what should be 0 has other last bits, too."""
_ROUNDINGS: Final = ((1.0, 0.37), (math.sqrt(2.0), 0.81))
"""(factor of the largest value, part of a cell): what lies at the edge of a cell in one of them
does not in the other one."""

_Row = dict[str, list[str]]
"""By leaf a digest, or the kind of a tensor and a digest for each way to round, of which one is
enough."""


class _Description(BaseModel):
    of: str
    splits: dict[str, dict[str, _Row]]


def described_rows(job: JobSpec, data: Mapping[str, Dataset]) -> str:
    """Returns some rows of each split as JSON; "" where they need not be the same elsewhere, or
    cannot be described briefly."""
    if job.data.entrypoint is None or not job.execution.deterministic:
        return ""
    splits = {split: dict(_rows_of(dataset)) for split, dataset in data.items()}
    text = _Description(of=_source_of(job), splits=splits).model_dump_json()
    return text if len(text) <= MAX_CHARS else ""


def check_same_rows(job: JobSpec, data: Mapping[str, Dataset], known: str, where: str) -> None:
    """Compares rows with those that `described_rows` has described elsewhere, of the same function.

    where: completes "is not the same". Raises InvalidInputError naming the row and what differs.
    """
    described = described_rows(job, data) if known else ""
    if not described:
        return
    before, now = _read(known), _read(described)
    if before.of != now.of:
        return
    for split, rows in before.splits.items():
        for number, row in rows.items():
            again = now.splits.get(split, {}).get(number)
            if again is not None and (differing := _differing(row, again)):
                raise _differs(split, number, differing, where)


def _read(text: str) -> _Description:
    """Returns a description that another process has made; an empty one of a text that is none."""
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
    """Returns a digest of all that decides which rows a data function makes."""
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
    """Returns the first row, the last one, and some between them, without repetition."""
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
    found = flat.index_select(0, places).double().tolist()
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    return [kind, *(_rounded(found, *rounding) for rounding in _ROUNDINGS)]


def _rounded(values: list[float], factor: float, offset: float) -> str:
    """Returns a digest of rounded values: no value of the data stands in a description."""
    largest = max([abs(x) for x in values if math.isfinite(x)] + [_SMALLEST])
    exponent = math.frexp(largest * factor)[1] - _CELLS
    size = math.ldexp(1.0, exponent)
    cells = [math.floor(x / size + offset) if math.isfinite(x) else str(x) for x in values]
    return hashlib.sha256(repr((exponent, cells)).encode()).hexdigest()[:16]


def _differing(row: _Row, again: _Row) -> str:
    """Returns the path of a leaf that differs; "" where none does."""
    paths = (path for path in row | again if not _alike(row.get(path, []), again.get(path, [])))
    return next(paths, "")


def _alike(one: list[str], other: list[str]) -> bool:
    same = [x == y for x, y in zip(one, other, strict=False)]
    return len(one) == len(other) and all(same[:1]) and (len(one) == 1 or any(same[1:]))
