"""Describe the workers that an engine is to start for a run: how many, by which command line.

A launcher keeps no state: the run belongs to the coordinator, the processes to the engine.
"""

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from shutil import which
from typing import Final

from stratagem.client.sdk.blocking import Client, RunHandle
from stratagem.client.sdk.torch_process import import_folders
from stratagem.common.base.errors import InvalidInputError, StratagemError, UnavailableError
from stratagem.common.base.ids import RunId
from stratagem.common.job import JobSpec, entry_points
from stratagem.common.rpc.channel import split_addresses
from stratagem.common.schema.json import suggest

# ---- Launches ----

OF_THE_LAUNCHER: Final = ("--rendezvous", "--coordinator", "--for-run", "--name")


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """A description of equal workers to start for a run: their number and their command line."""

    run_id: RunId
    coordinator: str
    num_workers: int
    command: tuple[str, ...]
    """The command line of one worker, without the option that names the launcher."""

    def command_of(self, launcher: str) -> tuple[str, ...]:
        """Return the command line of a worker that is started by this launcher, such as "slurm"."""
        return (*self.command, "--rendezvous", launcher)


def check_addresses(option: str, addresses: str) -> None:
    """Raise InvalidInputError unless an option's value is a list of coordinator addresses."""
    try:
        split_addresses(addresses)
    except ValueError as error:
        raise InvalidInputError.at(option, str(error)) from None


def launch_of(
    job: JobSpec,
    run_id: RunId,
    coordinator: str,
    num_workers: int,
    python: str,
    folders: tuple[str, ...],
    options: tuple[str, ...],
) -> WorkerLaunch:
    """Describe the workers to start for a run of a job. They may import only what the job names,
    unless the options have `--allow`.

    python: the path of the interpreter on the nodes. folders: the paths of the user's modules
    there. options: further options of each worker. Raises InvalidInputError for options that a
    worker does not have or that the launch sets, and for a job that brings code if no option
    accepts code.
    """
    for name in OF_THE_LAUNCHER:
        if name in {option.partition("=")[0] for option in options}:
            raise InvalidInputError.at("--worker", f"{name} is set by the launch; leave it out")
    given = names_of(options)
    if job.code is not None and "--allow-code" not in given:
        problem = "the job brings code along; say which may run, as in --worker '--allow-code any'"
        raise InvalidInputError.at("--worker", problem)
    command = [python, "-m", "stratagem.worker", "--coordinator", coordinator, "--for-run", run_id]
    if "--allow" not in given and "--site" not in given:
        for name in entry_points(job):
            command += ["--allow", name]
    if "--import-path" not in given:
        for folder in folders:
            command += ["--import-path", folder]
    return WorkerLaunch(run_id, coordinator, num_workers, (*command, *options))


# ---- Options of workers ----
#
# The options of a worker are listed by the kinds of their values.
#
# A launch refuses other options before anything is handed over: workers that an engine starts,
# perhaps hours later, would refuse them one by one. The settings themselves belong to the worker,
# which need not be installed on the launching machine; a test compares the two. The functions are
# pure.

FLAGS: Final = frozenset(
    {
        *("--allow-insecure-network", "--ephemeral", "--log-json", "--metrics-tls"),
        *("--open-files", "--signed-states", "--tunnel"),
    }
)
"""Worker options without a value; each also has a negative form, --no-..."""
INTEGERS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("--health-port", "--max-blob-memory-bytes", "--max-readers"), 0),
    **dict.fromkeys(("--max-calls", "--max-early-bytes", "--max-sessions", "--max-uploads"), 1),
    **dict.fromkeys(("--max-state-bytes", "--max-state-tensors", "--threads"), 1),
    "--metrics-port": 0,
}
"""Worker options with an integer value, each with its minimum."""
MOST: Final[Mapping[str, int]] = dict.fromkeys(("--health-port", "--metrics-port"), 65535)
"""The maximum of those integer options that have a maximum."""
SECONDS: Final = frozenset(
    {
        *("--abort-grace-s", "--compile-timeout-s", "--drain-grace-s", "--exchange-timeout-s"),
        *("--stall-report-s", "--stream-idle-timeout-s"),
    }
)
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "--data-plane": ("trusted", "tls"),
    "--log-level": ("debug", "info", "warning", "error"),
    "--mesh": ("auto", "shm", "nccl", "gloo", "grpc"),
    "--preempt-signal": ("USR1", "USR2", "HUP", "QUIT", "XCPU", "URG", ""),
    "--rendezvous": ("torchrun", "slurm", "kubernetes", "mpi", "env"),
}
TEXTS: Final = frozenset(
    {
        *("--activation-store", "--advertise", "--allow", "--allow-code", "--build-dir"),
        *("--coordinator", "--data-dir", "--data-root", "--device", "--for-run", "--import-path"),
        *("--listen", "--local-data", "--metrics-client-ca", "--metrics-deployment"),
        *("--metrics-tls-cert", "--metrics-tls-key", "--metrics-token-file", "--name", "--pool"),
        *("--previous-exit", "--privacy-secret", "--proxy", "--ready-file", "--revoked-file"),
        *("--site", "--state-folder", "--tags", "--tls-ca", "--tls-cert", "--tls-key"),
    }
)
"""Worker options whose value may be any text, because it names something on the nodes."""

_WITHOUT_VALUE: Final = FLAGS | {f"--no-{name.removeprefix('--')}" for name in FLAGS}
_KNOWN: Final = (*sorted(_WITHOUT_VALUE), *INTEGERS, *SECONDS, *CHOICES, *TEXTS)
_FIELD: Final = "--worker"


def names_of(words: Sequence[str]) -> frozenset[str]:
    """Return the names of the worker options in a command line. Raises InvalidInputError for
    options that a worker would refuse."""
    names, rest = set[str](), iter(words)
    for word in rest:
        name, has_value, value = word.partition("=")
        if name not in _KNOWN:
            what = (
                "is not an option of a worker" if name.startswith("-") else "belongs to no option"
            )
            hint = suggest(name, _KNOWN) or "; `stratagem worker --help` lists them"
            raise InvalidInputError.at(_FIELD, f"{word[:80]!r} {what}{hint}")
        names.add(name)
        if name not in _WITHOUT_VALUE and not has_value:
            value = next(rest, "--")
            if value.startswith("--"):
                raise InvalidInputError.at(_FIELD, f"{name} needs a value, as in {name}=VALUE")
        if allowed := _why_not(name, value, has_value=bool(has_value)):
            raise InvalidInputError.at(_FIELD, f"{name} is {value[:80]!r}; allowed is {allowed}")
    return frozenset(names)


def _why_not(name: str, value: str, *, has_value: bool) -> str:
    """Return a description of the values that an option allows; "" if the given value is one."""
    if name in _WITHOUT_VALUE:
        return "no value" if has_value else ""
    if name in INTEGERS:
        least, most = INTEGERS[name], MOST.get(name)
        is_number = value.isascii() and value.isdecimal()
        if is_number and int(value) >= least and (most is None or int(value) <= most):
            return ""
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        return f"a whole number {bounds}"
    if name in SECONDS:
        return "" if _is_time(value) else "a number of seconds"
    if name in CHOICES:
        choices = CHOICES[name]
        return "" if value in choices else f"one of {', '.join(filter(None, choices))}"
    return ""


def _is_time(text: str) -> bool:
    try:
        return isfinite(float(text)) and float(text) >= 0
    except ValueError:
        return False


# ---- Submission ----
#
# A run is submitted for workers that an engine starts, and is stopped if the engine takes none.


@contextmanager
def submitted_run(client: Client, job: JobSpec, run_id: RunId, job_path: Path) -> Iterator[None]:
    """Context manager that submits the run; its block submits the workers.

    If the block fails or is interrupted, the run is stopped, unless it existed before and has
    workers. The error or the KeyboardInterrupt says what happened to the run. Workers that the
    engine still starts after an interrupt find that the run was stopped, and leave.
    """
    how = f"`stratagem stop {run_id} --coordinator {client.address}` stops it"
    try:
        handle = client.submit(job, run_id, import_path=import_folders(job_path))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; run {run_id} may be submitted: {how}") from None
    try:
        yield
    except UnavailableError as error:
        raise UnavailableError(f"{error}; {_without_workers(handle, how)}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {_without_workers(handle, how)}") from None


def _without_workers(handle: RunHandle, how: str) -> str:
    """Stop a run whose workers could not be submitted, and return a text on what happened to it.
    how: a text with the command that stops it."""
    if not handle.created:
        return f"run {handle.run_id}, which was there before, goes on"
    try:
        handle.cancel()
    except StratagemError as error:
        return f"and run {handle.run_id} could not be stopped: {error}; {how}"
    except KeyboardInterrupt:
        text = f"interrupted; run {handle.run_id} may not have been stopped: {how}"
        raise KeyboardInterrupt(text) from None
    return f"run {handle.run_id}, submitted for it, was stopped"


# ---- Programs of a site ----
#
# A site takes jobs by programs such as sbatch and kubectl.

TIMEOUT_S: Final = 60.0


def check_options(options: Iterable[str], program: str) -> None:
    """Raise InvalidInputError for words that are not options, before anything is submitted."""
    for option in options:
        if re.match(r"-\w|--\w", option) is None or "\n" in option:
            problem = f"{option!r} is not an option of {program}; write --name=VALUE after --"
            raise InvalidInputError.at("options", problem)


@dataclass(frozen=True, slots=True)
class SiteProgram:
    """A command-line program that submits jobs at the user's site, such as sbatch."""

    name: str
    advice: str
    """The advice to users if the program is missing on this machine."""

    def check(self) -> None:
        """Raise UnavailableError if the program is missing, before it is needed."""
        if which(self.name) is None:
            raise self._missing()

    def answer(self, *arguments: str) -> str:
        """Run the program and return its output. Raises UnavailableError if the program is missing,
        does not answer, or refuses."""
        try:
            done = subprocess.run(
                [self.name, *arguments],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except FileNotFoundError:
            raise self._missing() from None
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"{self.name} has not answered in {TIMEOUT_S:g} s") from None
        if done.returncode != 0:
            raise UnavailableError(f"{self.name}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def _missing(self) -> UnavailableError:
        return UnavailableError(f"there is no {self.name} here; {self.advice}")
