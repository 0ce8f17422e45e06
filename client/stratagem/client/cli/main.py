"""Assemble the commands of `stratagem`."""

from importlib.metadata import version
from typing import Annotated, Final

import typer

from stratagem.client.cli import identity, jobs, queries, servers
from stratagem.client.cli import launch as launch_commands
from stratagem.client.cli import run as run_commands
from stratagem.client.cli import verify as verify_commands
from stratagem.client.cli.shared import as_command
from stratagem.client.terminal import completion

HELP: Final = """Train one PyTorch model on many machines, by a strategy that the job file names.

Try it without a server: stratagem run job.yaml --local 2

Exit codes: 0 done, 1 failed, 2 usage error, 130 interrupted.
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

app.command()(as_command(run_commands.run))
app.command()(as_command(jobs.check))
app.command("list")(as_command(queries.list_runs))
app.command()(as_command(queries.status))
app.command()(as_command(queries.logs))
app.command()(as_command(run_commands.watch))
app.command()(as_command(run_commands.attach))
app.command()(as_command(queries.stop))
app.command()(as_command(run_commands.resume))
app.command()(as_command(queries.delete))
app.command()(as_command(queries.pin))
app.command()(as_command(queries.unpin))
app.command()(as_command(queries.download))
app.command()(as_command(queries.backup))
app.command()(as_command(jobs.export))
app.command()(as_command(queries.report))
app.command()(as_command(queries.population))
app.command()(as_command(verify_commands.verify))
app.command()(as_command(verify_commands.compare))
app.command()(as_command(queries.workers))
app.command(cls=servers.DoctorCommand)(as_command(servers.doctor))
app.command()(as_command(servers.dashboard))
app.command()(as_command(jobs.estimate))
app.command()(as_command(jobs.recommend))
app.command()(as_command(servers.up))
app.command()(as_command(servers.health))
app.command()(completion.completion)
app.add_typer(identity.certs, name="certs")
app.add_typer(identity.token, name="token")
app.add_typer(jobs.code, name="code")
app.add_typer(servers.audit, name="audit")
app.add_typer(launch_commands.launch, name="launch")
app.command(context_settings=PASS_THROUGH, add_help_option=False)(servers.coordinator)
app.command(context_settings=PASS_THROUGH, add_help_option=False)(servers.worker)
app.command(context_settings=PASS_THROUGH, add_help_option=False)(servers.restore)


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
