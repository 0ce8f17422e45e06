"""Assembles the commands of `stratagem`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Final

import typer

from stratagem.client.cli import (
    planning_commands,
    query_commands,
    run_commands,
    server_commands,
)

HELP: Final = """Train one PyTorch model on many machines under a strategy that is data.

Try it without a server: stratagem run job.yaml --local 2

Exit codes: 0 done, 1 failed, 130 interrupted.
"""

app = typer.Typer(
    name="stratagem",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

PASS_THROUGH: Final = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command()(run_commands.run)
app.command("list")(query_commands.list_runs)
app.command()(query_commands.status)
app.command()(query_commands.logs)
app.command()(run_commands.watch)
app.command()(run_commands.attach)
app.command()(query_commands.stop)
app.command()(run_commands.resume)
app.command()(query_commands.download)
app.command()(query_commands.workers)
app.command()(planning_commands.estimate)
app.command()(planning_commands.recommend)
app.command()(server_commands.up)
app.command()(server_commands.health)
app.command(context_settings=PASS_THROUGH, add_help_option=False)(server_commands.coordinator)
app.command(context_settings=PASS_THROUGH, add_help_option=False)(server_commands.worker)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"stratagem {version('stratagem')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The program `stratagem`."""
    app()
