"""The data sets of a site, as its file names them: never by a function that came with a job."""

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from stratagem.common.base.errors import RefusedBySiteError
from stratagem.common.schema.json import dump_json
from stratagem.worker.data.data_factory import DataFunction, made_data
from stratagem.worker.data.data_sources import LocalData, read_tensors
from stratagem.worker.data.datasets import Dataset
from stratagem.worker.data.stream_dataset import StreamedSplit
from stratagem.worker.site.site_file import SiteDataSpec, SiteFile
from stratagem.worker.user_code.entrypoints import EntryPoints

_TRAIN: Final = "train"


def site_data(site: SiteFile, import_paths: tuple[str, ...]) -> dict[str, LocalData]:
    """Return what loads each data set of the site, by name."""
    return {
        name: partial(_load, site, name, spec, import_paths)
        for name, spec in site.spec.data.items()
    }


def absent_data(site: SiteFile, import_paths: tuple[str, ...]) -> Iterator[str]:
    """Yield a sentence for each data set whose file, or whose loader's module, is not there now.

    Nothing is imported: a loader may need minutes for that.
    """
    for name, spec in site.spec.data.items():
        if spec.file is not None and not site.path(spec.file).is_file():
            yield f"data.{name}.file: {site.path(spec.file)} is no file"
        package = (spec.entrypoint or "").partition(":")[0].partition(".")[0]
        if package and not _is_found(package, import_paths):
            text = f"no module {package!r} is installed, or in --import-path"
            yield f"data.{name}.entrypoint: {spec.entrypoint!r} cannot be found: {text}"


def _is_found(package: str, import_paths: tuple[str, ...]) -> bool:
    return (
        package in sys.modules
        or importlib.util.find_spec(package) is not None
        or PathFinder.find_spec(package, list(import_paths)) is not None
    )


def data_version(site: SiteFile) -> str:
    """Return a text that differs when the data of the site are defined otherwise."""
    return dump_json({name: spec.document() for name, spec in site.spec.data.items()})


def _load(
    site: SiteFile, name: str, spec: SiteDataSpec, import_paths: tuple[str, ...], seed: int | None
) -> Mapping[str, Dataset]:
    """Load a data set. Raises RefusedBySiteError where it has too few rows."""
    if spec.entrypoint is None:
        assert spec.file is not None
        splits = read_tensors(Path(site.path(spec.file)), f"data.{name}.file")
    else:
        entrypoints = EntryPoints((spec.entrypoint,), import_paths)
        function = DataFunction(spec.entrypoint, spec.kwargs, collate=None)
        splits = made_data(function, entrypoints, {}, seed)
    streams = [split for split, rows in splits.items() if isinstance(rows, StreamedSplit)]
    if streams:
        text = f"data.{name}: its split {streams[0]} is a stream, whose rows cannot be counted"
        raise RefusedBySiteError(f"site {site.spec.site} refuses: {text}")
    num_rows = len(splits[_TRAIN]) if _TRAIN in splits else 0
    if num_rows < spec.min_rows:
        text = f"data.{name}.min_rows: it has fewer rows to train on than {spec.min_rows}"
        raise RefusedBySiteError(f"site {site.spec.site} refuses: {text}")
    return splits
