"""Assembles the commands of `stratagem`."""

from importlib.metadata import version
from typing import Annotated, Final

import typer

from stratagem.client.cli import (
    audit_command,
    check_command,
    code_commands,
    course_commands,
    doctor_commands,
    export_command,
    identity_commands,
    launch_commands,
    planning_commands,
    query_commands,
    run_commands,
    server_commands,
)
from stratagem.client.cli.options import with_proof
from stratagem.client.terminal import completion

HELP: Final = """Train one PyTorch model on many machines under a strategy that is data.

Try it without a server: stratagem run job.yaml --local 2

Exit codes: 0 done, 1 failed, 2 wrong use of a command, 130 interrupted.
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
app.command()(with_proof(check_command.check))
app.command("list")(with_proof(query_commands.list_runs))
app.command()(with_proof(query_commands.status))
app.command()(with_proof(query_commands.logs))
app.command()(with_proof(run_commands.watch))
app.command()(with_proof(run_commands.attach))
app.command()(with_proof(query_commands.stop))
app.command()(with_proof(run_commands.resume))
app.command()(with_proof(query_commands.delete))
app.command()(with_proof(query_commands.pin))
app.command()(with_proof(query_commands.unpin))
app.command()(with_proof(query_commands.download))
app.command()(with_proof(query_commands.backup))
app.command()(with_proof(export_command.export))
app.command()(with_proof(course_commands.report))
app.command()(with_proof(course_commands.population))
app.command()(with_proof(query_commands.workers))
app.command(cls=doctor_commands.DoctorCommand)(with_proof(doctor_commands.doctor))
app.command()(with_proof(server_commands.dashboard))
app.command()(planning_commands.estimate)
app.command()(with_proof(planning_commands.recommend))
app.command()(server_commands.up)
app.command()(server_commands.health)
app.command()(completion.completion)
app.add_typer(identity_commands.certs, name="certs")
app.add_typer(identity_commands.token, name="token")
app.add_typer(code_commands.code, name="code")
app.add_typer(audit_command.audit, name="audit")
app.add_typer(launch_commands.launch, name="launch")
app.command(context_settings=PASS_THROUGH, add_help_option=False)(server_commands.coordinator)
app.command(context_settings=PASS_THROUGH, add_help_option=False)(server_commands.worker)
app.command(context_settings=PASS_THROUGH, add_help_option=False)(server_commands.restore)


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
