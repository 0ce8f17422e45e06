"""Assemble the commands of `stratagem`."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, Final

import typer

from stratagem.client.cli.shared import as_command

HELP: Final = """Train one PyTorch model on many machines, by a strategy that the job file names.

Try it without a server: stratagem run job.yaml --local 2

Exit codes: 0 done, 1 failed, 2 usage error, 130 interrupted.
"""
PASS_THROUGH: Final = {"allow_extra_args": True, "ignore_unknown_options": True}

# ---- Commands ----
#
# The commands of a module are added together, and a module is imported only for a command of it.


def _add_runs(app: typer.Typer) -> None:
    from stratagem.client.cli import run

    app.command("run")(as_command(run.run))
    app.command("watch")(as_command(run.watch))
    app.command("attach")(as_command(run.attach))
    app.command("resume")(as_command(run.resume))


def _add_jobs(app: typer.Typer) -> None:
    from stratagem.client.cli import jobs

    app.command("check")(as_command(jobs.check))
    app.command("export")(as_command(jobs.export))
    app.command("estimate")(as_command(jobs.estimate))
    app.command("recommend")(as_command(jobs.recommend))
    app.add_typer(jobs.code, name="code")


def _add_queries(app: typer.Typer) -> None:
    from stratagem.client.cli import queries

    app.command("list")(as_command(queries.list_runs))
    app.command("status")(as_command(queries.status))
    app.command("logs")(as_command(queries.logs))
    app.command("stop")(as_command(queries.stop))
    app.command("delete")(as_command(queries.delete))
    app.command("pin")(as_command(queries.pin))
    app.command("unpin")(as_command(queries.unpin))
    app.command("download")(as_command(queries.download))
    app.command("backup")(as_command(queries.backup))
    app.command("report")(as_command(queries.report))
    app.command("population")(as_command(queries.population))
    app.command("workers")(as_command(queries.workers))


def _add_verification(app: typer.Typer) -> None:
    from stratagem.client.cli import verify

    app.command("verify")(as_command(verify.verify))
    app.command("compare")(as_command(verify.compare))


def _add_servers(app: typer.Typer) -> None:
    from stratagem.client.cli import servers

    app.command("doctor", cls=servers.DoctorCommand)(as_command(servers.doctor))
    app.command("dashboard")(as_command(servers.dashboard))
    app.command("up")(as_command(servers.up))
    app.command("health")(as_command(servers.health))
    app.add_typer(servers.audit, name="audit")
    for program in (servers.coordinator, servers.worker, servers.restore):
        add = app.command(program.__name__, context_settings=PASS_THROUGH, add_help_option=False)
        add(program)


def _add_completion(app: typer.Typer) -> None:
    from stratagem.client.terminal import completion

    app.command("completion")(completion.completion)


def _add_identity(app: typer.Typer) -> None:
    from stratagem.client.cli import identity

    app.add_typer(identity.certs, name="certs")
    app.add_typer(identity.token, name="token")


def _add_launch(app: typer.Typer) -> None:
    from stratagem.client.cli import launch

    app.add_typer(launch.launch, name="launch")


_ADDED_BY: Final[Mapping[str, Callable[[typer.Typer], None]]] = {
    "run": _add_runs,
    "check": _add_jobs,
    "list": _add_queries,
    "status": _add_queries,
    "logs": _add_queries,
    "watch": _add_runs,
    "attach": _add_runs,
    "stop": _add_queries,
    "resume": _add_runs,
    "delete": _add_queries,
    "pin": _add_queries,
    "unpin": _add_queries,
    "download": _add_queries,
    "backup": _add_queries,
    "export": _add_jobs,
    "report": _add_queries,
    "population": _add_queries,
    "verify": _add_verification,
    "compare": _add_verification,
    "workers": _add_queries,
    "doctor": _add_servers,
    "dashboard": _add_servers,
    "estimate": _add_jobs,
    "recommend": _add_jobs,
    "up": _add_servers,
    "health": _add_servers,
    "completion": _add_completion,
    "certs": _add_identity,
    "token": _add_identity,
    "code": _add_jobs,
    "audit": _add_servers,
    "launch": _add_launch,
    "coordinator": _add_servers,
    "worker": _add_servers,
    "restore": _add_servers,
}
"""The function that adds each command, in the order of the help."""


def assemble(words: Sequence[str] = ()) -> typer.Typer:
    """Return the program with the commands that the words of a command line need: those of one
    module if they begin with a command, else all."""
    app = typer.Typer(
        name="stratagem",
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(options)
    asked = [_ADDED_BY[word] for word in words[:1] if word in _ADDED_BY]
    for add in asked or dict.fromkeys(_ADDED_BY.values()):
        add(app)
    places = {name: place for place, name in enumerate(_ADDED_BY)}
    app.registered_commands.sort(key=lambda command: places[command.name or ""])
    app.registered_groups.sort(key=lambda group: places[str(group.name)])
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"stratagem {version('stratagem')}")
        raise typer.Exit


def options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass
