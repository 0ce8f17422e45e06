"""Tables of the documentation, read off the code: settings and metrics of the processes, commands.

Owns how a flag is spelled in words. Knows no page.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any, get_args

import typer.main
from pydantic_core import PydanticUndefined

from docs.tables import default_text, table, value_text
from stratagem.client.cli.main import assemble
from stratagem.common.observe.metrics import Metric
from stratagem.common.observe.metrics_server import SHARED
from stratagem.coordinator.process import metrics as coordinator
from stratagem.coordinator.runtime.settings import Settings
from stratagem.worker.process import metrics as worker
from stratagem.worker.process.settings import WorkerSettings

FLAG_HEAD = ("flag", "default", "meaning")
OPTION_HEAD = ("option", "meaning")
SHARED_BY = 3
"""An option that so many commands have, with the same meaning, is described once."""
CONNECTION = tuple(
    f"`--{each}`" for each in ("coordinator", "tls-ca", "tls-cert", "tls-key", "token-file")
)
"""Options that all commands that talk to a coordinator have."""


def settings(kind: type[Settings] | type[WorkerSettings]) -> str:
    """Flags of a process which the other kind of process has not, or not with the same meaning."""
    shared = set(_flags(Settings)) & set(_flags(WorkerSettings))
    return table(FLAG_HEAD, (row for row in _flags(kind) if row not in shared))


def shared_settings() -> str:
    """Flags that mean the same for a coordinator and a worker."""
    of_worker = set(_flags(WorkerSettings))
    return table(FLAG_HEAD, (row for row in _flags(Settings) if row in of_worker))


def _flags(kind: type[Settings] | type[WorkerSettings]) -> Iterator[tuple[str, ...]]:
    """Flag, default and meaning; the variable follows from the flag."""
    for name, info in kind.model_fields.items():
        default = "computed" if info.default is PydanticUndefined else default_text(info)
        default = "**required**" if info.is_required() else default
        yield f"`--{name.replace('_', '-')}`", default, info.description or ""


def commands() -> str:
    """Every verb of the command line with its options."""
    return "\n\n".join(_command(name, each) for name, each in _commands_of())


def shared_options() -> str:
    """The options that many commands have."""
    return table(OPTION_HEAD, (row for row in _shared()))


@cache
def _shared() -> dict[tuple[str, str], str]:
    """Return the names by which commands refer to the rows of the table of shared options."""
    rows = Counter(row for _, command in _commands_of() for row in _options_of(command).items())
    found = {row: name for (name, row), num in rows.items() if num >= SHARED_BY}
    assert len(set(found.values())) == len(found), "two shared options have one name"
    return found


def _options_of(command: Any) -> dict[str, tuple[str, str]]:
    """The rows of a command's options, by the first name of each."""
    options = [each for each in command.params if each.param_type_name == "option"]
    return {each.opts[0]: (_spelled(each), _meaning(each)) for each in options}


def _commands_of(group: Any = None, before: str = "") -> Iterator[tuple[str, Any]]:
    top: Any = group or typer.main.get_command(assemble())
    for name, each in top.commands.items():
        if hasattr(each, "commands"):
            yield from _commands_of(each, f"{before}{name} ")
        else:
            yield before + name, each


@cache
def options() -> dict[str, frozenset[str]]:
    """Return the options of each command, such as "certs init"."""
    found = {
        name: {option for each in command.params for option in each.opts}
        for name, command in _commands_of()
    }
    for name, kind in (("coordinator", Settings), ("worker", WorkerSettings)):
        for field in kind.model_fields:
            flag = field.replace("_", "-")
            found[name] |= {f"--{flag}", f"--no-{flag}"}
    found["restore"] |= found["coordinator"]
    found["doctor"] |= found["worker"]  # what follows --worker-settings
    return {name: frozenset({"--help", *each}) for name, each in found.items()}


def _command(name: str, command: Any) -> str:
    arguments = [each.metavar for each in command.params if each.param_type_name == "argument"]
    parts = [f"### `{' '.join(['stratagem', name, *arguments])}`", command.help or ""]
    options = _options_of(command)
    own = [row for row in options.values() if row not in _shared()]
    if own:
        parts.append(table(OPTION_HEAD, own))
    shared = [f"`{_shared()[row]}`" for row in options.values() if row in _shared()]
    if all(each in shared for each in CONNECTION):
        shared = ["connection", *(each for each in shared if each not in CONNECTION)]
    if shared:
        parts.append(f"[Shared options](#shared-options): {', '.join(shared)}.")
    return "\n\n".join(parts)


def _spelled(option: Any) -> str:
    value = f" {option.metavar}" if option.metavar else ""
    return ", ".join(f"`{each}{value}`" for each in option.opts)


def _meaning(option: Any) -> str:
    """Return the meaning of an option, with its values, variable and default if it has any."""
    said = [option.help or ""]
    kind = option.type_descriptor.annotation
    for each in (kind, *get_args(kind)):
        if isinstance(each, type) and issubclass(each, Enum):
            said.append(f"One of {', '.join(map(value_text, each))}.")
    if option.required:
        said.append("Required.")
    if option.envvar:
        said.append(f"Variable: `{option.envvar}`.")
    if option.default not in (None, [], False, ""):
        said.append(f"Default: {value_text(option.default)}.")
    return " ".join(said)


def scraped(metrics: Iterable[Metric]) -> str:
    """Metrics of a process."""
    rows = (
        (f"`{each.name}`", each.kind, ", ".join(f"`{x}`" for x in each.labels), each.meaning)
        for each in metrics
    )
    return table(("metric", "type", "labels", "meaning"), rows)


def _own(metrics: Iterable[Metric]) -> list[Metric]:
    return [each for each in metrics if each not in SHARED]


RENDERED: Mapping[str, Callable[[], str]] = {
    "shared options": shared_options,
    "commands": commands,
    "settings shared": shared_settings,
    "settings coordinator": lambda: settings(Settings),
    "settings worker": lambda: settings(WorkerSettings),
    "scraped coordinator": lambda: scraped(_own(coordinator.METRICS)),
    "scraped worker": lambda: scraped(_own(worker.METRICS)),
    "scraped process": lambda: scraped(SHARED),
}
"""The makers of the parts by the names of their markers."""
