"""Assembles the commands of `stratagem`."""

from importlib.metadata import version
from typing import Annotated, Final

import typer

from stratagem.client.cli import identity, jobs, queries, servers
from stratagem.client.cli import launch as launch_commands
from stratagem.client.cli import run as run_commands
from stratagem.client.cli import verify as verify_commands
from stratagem.client.cli.shared import with_proof
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

app.command()(with_proof(run_commands.run))
app.command()(with_proof(jobs.check))
app.command("list")(with_proof(queries.list_runs))
app.command()(with_proof(queries.status))
app.command()(with_proof(queries.logs))
app.command()(with_proof(run_commands.watch))
app.command()(with_proof(run_commands.attach))
app.command()(with_proof(queries.stop))
app.command()(with_proof(run_commands.resume))
app.command()(with_proof(queries.delete))
app.command()(with_proof(queries.pin))
app.command()(with_proof(queries.unpin))
app.command()(with_proof(queries.download))
app.command()(with_proof(queries.backup))
app.command()(with_proof(jobs.export))
app.command()(with_proof(queries.report))
app.command()(with_proof(queries.population))
app.command()(with_proof(verify_commands.verify))
app.command()(with_proof(verify_commands.compare))
app.command()(with_proof(queries.workers))
app.command(cls=servers.DoctorCommand)(with_proof(servers.doctor))
app.command()(with_proof(servers.dashboard))
app.command()(jobs.estimate)
app.command()(with_proof(jobs.recommend))
app.command()(servers.up)
app.command()(servers.health)
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
