"""Tables of the documentation, read off the code: settings and metrics of the processes, commands.

Owns how a flag is spelled in words. Knows no page.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import typer.main
from pydantic_core import PydanticUndefined

from docs.tables import default_text, table, value_text
from stratagem.client.cli.main import app
from stratagem.common.observe.metric_definition import Metric
from stratagem.common.observe.process_metrics import SHARED
from stratagem.coordinator.process import coordinator_metrics as coordinator
from stratagem.coordinator.runtime.settings import Settings
from stratagem.worker.process import worker_metrics as worker
from stratagem.worker.process.worker_settings import WorkerSettings


def settings(kind: type[Settings] | type[WorkerSettings]) -> str:
    """Flags and environment variables of a process."""
    prefix = kind.model_config["env_prefix"]

    def rows() -> Iterator[tuple[str, ...]]:
        for name, info in kind.model_fields.items():
            flag = f"`--{name.replace('_', '-')}`"
            default = "computed" if info.default is PydanticUndefined else default_text(info)
            default = "**required**" if info.is_required() else default
            yield (flag, f"`{prefix}{name.upper()}`", default, info.description or "")

    return table(("flag", "variable", "default", "meaning"), rows())


def commands() -> str:
    """Every verb of the command line with its options."""
    return "\n\n".join(_command(name, each) for name, each in _commands_of())


def _commands_of(group: Any = None, before: str = "") -> Iterator[tuple[str, Any]]:
    top: Any = group or typer.main.get_command(app)
    for name, each in top.commands.items():
        if hasattr(each, "commands"):
            yield from _commands_of(each, f"{before}{name} ")
        else:
            yield before + name, each


@cache
def options() -> dict[str, frozenset[str]]:
    """By command, such as "certs init", the options that it takes."""
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
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = " ".join(["stratagem", name, *(each.metavar for each in arguments)])
    parts = [f"### stratagem {name}", f"`{usage}`", command.help or ""]
    if options:
        rows = ((_spelled(each), _option_default(each), each.help) for each in options)
        parts.append(table(("option", "default", "meaning"), rows))
    return "\n\n".join(parts)


def _spelled(option: Any) -> str:
    value = f" {option.metavar}" if option.metavar else ""
    variable = f", or `{option.envvar}`" if option.envvar else ""
    return ", ".join(f"`{each}{value}`" for each in option.opts) + variable


def _option_default(option: Any) -> str:
    default = option.default
    return "none" if default is None or default == [] else value_text(default)


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
    "commands": commands,
    "settings coordinator": lambda: settings(Settings),
    "settings worker": lambda: settings(WorkerSettings),
    "scraped coordinator": lambda: scraped(_own(coordinator.METRICS)),
    "scraped worker": lambda: scraped(_own(worker.METRICS)),
    "scraped process": lambda: scraped(SHARED),
}
"""What a marker of this name is filled with."""
