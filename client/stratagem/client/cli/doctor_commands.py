"""The command that looks for what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from stratagem.client.cli import tables
from stratagem.client.cli.options import CoordinatorOption, Format, FormatOption
from stratagem.client.cli.query_commands import make_console
from stratagem.client.cli.reporting import FAILED, reporting
from stratagem.client.client import DEFAULT_ADDRESS
from stratagem.client.doctor import Finding, Level, examine
from stratagem.common.rpc.channel import PLAINTEXT, Proof

COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


def doctor(
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    form: FormatOption = Format.TEXT,
) -> None:
    """Examine this client, the coordinator and all its workers, and say what to do.

    Connection and latency, versions, certificates, clocks, disks, limits, torch, numerics, and
    whether workers reach each other. Nothing is changed.

    Exit code: 0 when nothing has failed (there may be warnings), else 1.
    """
    with reporting():
        findings = asyncio.run(examine(coordinator, proof))
    if form is Format.JSON:
        print(tables.many_to_json(findings))
    else:
        make_console().print(_table(findings))
    if any(each.level is Level.FAIL for each in findings):
        raise typer.Exit(FAILED)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table("check", "of", "", "found, and what to do", box=box.SIMPLE)
    for each in findings:
        told = Text(each.found)
        if each.advice:
            told.append(f"\n-> {each.advice}", style="bold")
        table.add_row(each.check, each.about, Text(each.level, style=COLOURS[each.level]), told)
    return table
