"""The command that looks for what is wrong."""

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from stratagem.client.cli.options import CoordinatorOption, Format, FormatOption
from stratagem.client.cli.reporting import FAILED, make_console, reporting
from stratagem.client.sdk.async_client import DEFAULT_ADDRESS
from stratagem.client.sdk.cluster_doctor import examine
from stratagem.client.terminal import tables
from stratagem.common.observe.findings import Finding, Level
from stratagem.common.rpc.channel import PLAINTEXT, Proof

WORKER_SETTINGS: Final = "--worker-settings"


class DoctorCommand(TyperCommand):
    """Typer command that passes all after `--worker-settings` on unparsed: these are options of a
    worker, and not of this command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if WORKER_SETTINGS in args:
            args.insert(args.index(WORKER_SETTINGS) + 1, "--")
        return super().parse_args(ctx, args)


def doctor(
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    form: FormatOption = Format.TEXT,
    is_worker: Annotated[
        bool,
        typer.Option(
            WORKER_SETTINGS,
            help="Examine the settings of a worker instead, here: all that follows is what "
            "`stratagem worker` would be given, besides STRATAGEM_WORKER_* of the environment.",
        ),
    ] = False,
    worker_options: Annotated[
        list[str] | None, typer.Argument(metavar="[WORKER OPTION]...", hidden=True)
    ] = None,
) -> None:
    """Say what is wrong with a cluster, and what to do.

    Examines this client, the coordinator and all its workers: connection and latency, versions,
    certificates, clocks, disks, limits, torch, numerics, and whether workers reach each other.
    Nothing is changed.

    Exit code: 0 when nothing has failed (there may be warnings), else 1.
    """
    if worker_options and not is_worker:
        raise typer.BadParameter(f"{worker_options[0]} stands for a worker: {WORKER_SETTINGS}")
    with reporting():
        if is_worker:
            findings = _of_worker(worker_options or [])
        else:
            findings = asyncio.run(examine(coordinator, proof))
    if form is Format.JSON:
        print(tables.many_to_json(findings))
    else:
        make_console().print(tables.findings_table(findings))
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(FAILED)


def _of_worker(options: Sequence[str]) -> list[Finding]:
    """Return the findings of a worker's own checks, made by a process of its own that loads torch
    and the user's modules."""
    if importlib.util.find_spec("torch") is None:
        advice = "pip install 'stratagem[worker]', or run this where the worker runs"
        return [Finding("torch", "worker", Level.FAIL, "is not installed here", advice)]
    command = [sys.executable, "-m", "stratagem.tools.doctor", *options]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not ended.stdout.startswith("["):  # --help, or a failure that stderr explains
        print(ended.stdout, end="")
        raise typer.Exit(ended.returncode)
    return [
        Finding(**{**finding, "level": Level(finding["level"])})
        for finding in json.loads(ended.stdout)
    ]
