"""Complete the command line in a shell: print the script, and offer run ids and fixed words.

Failures while a line is completed are silent, because there is nowhere to report them.
"""

import asyncio
import os
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Final

import typer
from typer import completion as of_typer

from stratagem.client.sdk.client import AsyncClient
from stratagem.client.sinks.sink import sink_names
from stratagem.common.identity.tls import tls_files

PATIENCE_S: Final = 0.3
"""The time within which a coordinator must answer; otherwise no run ids are offered."""
PROGRAM: Final = "stratagem"
VARIABLE: Final = "_STRATAGEM_COMPLETE"
"""The environment variable by which a shell asks for completions."""


EVENT_KINDS: Final = (
    *("BuildFailed", "ClientBenched", "ClientEvaluated", "ClientLeft", "ClientStateLost"),
    *(
        "ClientsAssigned",
        "ClientsJoined",
        "ClientsSelected",
        "Evaluated",
        "GenerationClosed",
        "MemberEvolved",
    ),
    *("MembersFormed", "ModelBuilt", "Noted", "PartyFailed", "PopulationFormed", "ProcessDied"),
    *("RosterFormed", "RoundClosed", "RoundWaits", "RunCancelled", "RunCompleted", "RunFailed"),
    *("RunReleased", "RunResumed", "RunSubmitted", "SegmentCommitted", "SegmentFinished"),
    *("SegmentRefuted", "SegmentVerified"),
    *("StoppedEarly", "UpdateReceived", "UpdateRejected", "UpdatesJudged"),
)
"""The kinds of events that are offered; a coordinator may know others."""


class ShellName(StrEnum):
    """A shell whose command lines can be completed."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[ShellName, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print a script that adds completion to a shell.

    It completes commands, options, ids of runs, kinds of events, and forms of exports.

    bash: add `source <(stratagem completion bash)` to ~/.bashrc.

    zsh: add `source <(stratagem completion zsh)` to ~/.zshrc, after compinit.

    fish: run `stratagem completion fish > ~/.config/fish/completions/stratagem.fish`.
    """
    names = {"prog_name": PROGRAM, "complete_var": VARIABLE, "shell": shell.value}
    print(of_typer.get_completion_script(**names))  # type: ignore[attr-defined]


def answer_shells() -> None:
    """Print completions and exit if a shell has started this program to ask for them."""
    if VARIABLE in os.environ:
        of_typer.completion_init()  # type: ignore[attr-defined]


def event_kinds(incomplete: str) -> list[str]:
    """Return the kinds of events that begin with the incomplete word."""
    return [kind for kind in EVENT_KINDS if kind.startswith(incomplete)]


def sink_forms(incomplete: str) -> list[str]:
    """Return the sink names that begin with the incomplete word, each with a colon."""
    return [form for name in sink_names() if (form := f"{name}:").startswith(incomplete)]


def run_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Return the run ids that begin with the incomplete word, newest first."""
    with suppress(Exception):
        return asyncio.run(asyncio.wait_for(_run_ids(context, incomplete), PATIENCE_S))
    return []


async def _run_ids(context: typer.Context, incomplete: str) -> list[str]:
    given = context.params
    tls = tls_files(
        given.get("tls_ca"), given.get("tls_cert"), given.get("tls_key"), needs_cert=False
    )
    address, token_file = given.get("coordinator"), given.get("token_file")
    async with AsyncClient(address, patience_s=PATIENCE_S, tls=tls, token_file=token_file) as api:
        runs = await api.runs()
    return [run.run_id for run in runs if run.run_id.startswith(incomplete)]
