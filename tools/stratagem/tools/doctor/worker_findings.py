"""Checks a worker's settings against its machine: disk, folders, devices, code that jobs may name.

Each check is a function from the settings to findings. Imports the modules that `--allow` names, as
a job would have it done; changes nothing else. Blocking.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from stratagem.common.base.errors import InvalidInputError, StratagemError
from stratagem.common.base.text import counted
from stratagem.common.observe import findings
from stratagem.common.observe.findings import Finding, Level
from stratagem.common.process.cpu_threads import available_cores
from stratagem.v1 import types_pb2
from stratagem.worker.numerics.precision import obstacles
from stratagem.worker.pipeline.activation_store import ActivationStore
from stratagem.worker.process.host import capability_of, device_of
from stratagem.worker.process.settings import WorkerSettings
from stratagem.worker.site.file import absent_data, read_site
from stratagem.worker.user_code.entrypoints import EntryPoints

_WILD: Final = frozenset("*?[")


def local_findings(settings: WorkerSettings, own: types_pb2.Environment) -> list[Finding]:
    """own: of this process."""
    return [
        *findings.limits(settings.worker_id, own),
        *_data_dir(settings),
        *findings.disk(settings.worker_id, own),
        *_device(settings, own),
        *_folders(settings.worker_id, "import path", settings.import_path),
        *_data_roots(settings),
        *_local_data(settings),
        *_site(settings),
        *_activation_store(settings),
        *_allowed(settings),
    ]


def _data_dir(settings: WorkerSettings) -> Iterator[Finding]:
    """One that is not there yet is made by the worker, where it may."""
    folder = settings.data_dir
    if folder is None or folder.is_dir():
        return
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        yield Finding("disk", settings.worker_id, Level.OK, f"{folder} will be made in {there}")
    else:
        advice = "make the folder for the worker's user, or name another one as --data-dir"
        found = f"{folder} is not there, and cannot be made in {there}"
        yield Finding("disk", settings.worker_id, Level.FAIL, found, advice)


def _device(settings: WorkerSettings, own: types_pb2.Environment) -> Iterator[Finding]:
    torch.set_num_threads(settings.threads)
    try:
        device = device_of(settings.device)
        capability = capability_of(device, settings.local_data, settings.tags)
    except (RuntimeError, StratagemError) as error:
        there = ", ".join(f"cuda:{n}" for n in range(len(own.cuda_devices))) or "none"
        advice = f"CUDA devices here: {there}; install a torch built for CUDA, or use --device cpu"
        found = str(error).partition("\n")[0]
        yield Finding("device", settings.worker_id, Level.FAIL, found, advice)
        return
    yield from findings.torch(settings.worker_id, own, capability)
    yield Finding("numerics", settings.worker_id, Level.OK, capability.numerics_description)
    yield _precision(settings.worker_id, device)
    num_processors = available_cores()
    if settings.threads > num_processors:
        advice = "threads that share a processor wait for each other: set --threads"
        found = f"{settings.threads} threads on {num_processors} processors"
        yield Finding("threads", settings.worker_id, Level.WARN, found, advice)


def _precision(name: str, device: torch.device) -> Finding:
    """Jobs that need more are refused; see numerics/precision.py."""
    missing = [f"{kind} as {numbers}" for numbers, kind, _ in obstacles(device)]
    found = "all kinds of layers can be trained in all precisions"
    if missing:
        found += f", but {', '.join(missing)}"
    return Finding("precision", name, Level.OK, found)


def _folders(name: str, check: str, folders: Iterable[str]) -> Iterator[Finding]:
    for folder in folders:
        if os.access(folder, os.R_OK | os.X_OK) and Path(folder).is_dir():
            yield Finding(check, name, Level.OK, folder)
        else:
            reason = "may not be read by this user" if Path(folder).is_dir() else "is no folder"
            advice = f"mount it here, or name another one as --{check.replace(' ', '-')}"
            yield Finding(check, name, Level.FAIL, f"{folder} {reason}", advice)


def _data_roots(settings: WorkerSettings) -> Iterator[Finding]:
    yield from _folders(settings.worker_id, "data root", settings.data_root)
    if not settings.data_roots:
        found = "none: jobs may not name files of this worker (data.path)"
        yield Finding("data root", settings.worker_id, Level.OK, found)


def _local_data(settings: WorkerSettings) -> Iterator[Finding]:
    for name, file in settings.local_data.items():
        try:
            with safe_open(file, "pt") as opened:
                keys = sorted(opened.keys())
        except (OSError, SafetensorError) as error:
            advice = "name a .safetensors file that this user may read: --local-data NAME=FILE"
            yield Finding("local data", settings.worker_id, Level.FAIL, f"{name}: {error}", advice)
        else:
            found = f"{name}: {', '.join(keys)}"
            yield Finding("local data", settings.worker_id, Level.OK, found)


def _site(settings: WorkerSettings) -> Iterator[Finding]:
    """The file of a site, and whether the functions that it loads its data with are there."""
    if settings.site is None:
        return
    name, advice = settings.worker_id, "see docs/reference/site-file.md"
    try:
        site = read_site(settings.site)
        spec, paths = site.spec, tuple(settings.import_path)
        if absent := "; ".join(absent_data(site, paths)):
            raise InvalidInputError(absent)
        for key, data in spec.data.items():
            if data.entrypoint is not None:
                known = EntryPoints((data.entrypoint,), paths)
                known.resolve(data.entrypoint, f"data.{key}.entrypoint")
    except StratagemError as error:
        yield Finding("site", name, Level.FAIL, f"{settings.site}: {error}", advice)
    else:
        found = f"{spec.site}: {', '.join(spec.data)}; {counted(len(spec.accept), 'rule')}"
        yield Finding("site", name, Level.OK, found)


def _activation_store(settings: WorkerSettings) -> Iterator[Finding]:
    if not settings.activation_store:
        return
    try:
        ActivationStore(settings.activation_store).check(settings.worker_id)
    except StratagemError as error:
        advice = "docs/how-to/operations.md has the variables; all workers must name the same store"
        yield Finding("activation store", settings.worker_id, Level.FAIL, str(error), advice)
    else:
        found = settings.activation_store
        yield Finding("activation store", settings.worker_id, Level.OK, found)


def _allowed(settings: WorkerSettings) -> Iterator[Finding]:
    """Each pattern of `--allow`, as far as it names something that can be looked for."""
    entrypoints = EntryPoints(tuple(settings.allow), tuple(settings.import_path))
    if not settings.allow and settings.site is None:  # whose file says it
        advice = "list what jobs may name as --allow 'package.module:*'; graphs run without"
        found = "nothing: jobs that name code of theirs are refused"
        yield Finding("allow", settings.worker_id, Level.WARN, found, advice)
    for pattern in settings.allow:
        yield _pattern(settings.worker_id, entrypoints, pattern)


def _pattern(name: str, entrypoints: EntryPoints, pattern: str) -> Finding:
    module, colon, _ = pattern.partition(":")
    if not colon:
        advice = "write it as 'package.module:name', or 'package.*:*'"
        return Finding("allow", name, Level.FAIL, f"{pattern} matches no entry point", advice)
    try:
        if not _WILD & set(pattern):
            entrypoints.resolve(pattern, "allow")
            return Finding("allow", name, Level.OK, f"{pattern} is there")
        imported = _certain_part(module)
        if not imported:
            advice = "fit for machines of your own; elsewhere name packages: 'package.*:*'"
            found = f"{pattern} lets jobs name any module there is"
            return Finding("allow", name, Level.WARN, found, advice)
        entrypoints.import_allowed(imported, "allow", pattern)
    except StratagemError as error:
        advice = "install it for this worker, add its folder as --import-path, or mend --allow"
        return Finding("allow", name, Level.FAIL, str(error), advice)
    return Finding("allow", name, Level.OK, f"{pattern}: {imported} can be imported")


def _certain_part(module: str) -> str:
    """The leading packages of a pattern of modules that have no wildcard in them."""
    parts = module.split(".")
    wild = next((n for n, part in enumerate(parts) if _WILD & set(part)), len(parts))
    return ".".join(parts[:wild])
