"""Commands that copy what a coordinator has, and make a coordinator's data of such a copy."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from stratagem.client.cli.options import CoordinatorOption
from stratagem.client.cli.query_commands import connected
from stratagem.client.cli.reporting import complain
from stratagem.client.sdk.async_client import DEFAULT_ADDRESS
from stratagem.common.rpc.channel import PLAINTEXT, Proof


def backup(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A new folder, or that of an earlier backup.")
    ],
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
) -> None:
    """Copy the journal and all states of this moment, while the coordinator goes on.

    Into the folder of an earlier backup only what is new is copied. Needs the scope admin. Make a
    coordinator's data of it with `stratagem restore`.
    """
    with connected(coordinator, proof) as client:
        done = client.back_up(folder)
    complain(
        f"{folder}: the journal of term {done.term} ({done.journal_bytes:,} bytes) and "
        f"{done.num_blobs} blobs, {done.num_copied} of them new"
    )


def restore(context: typer.Context) -> None:
    """Make an empty coordinator's data of a backup; its options follow.

    `stratagem restore --help` lists them: those of the coordinator that is started then.
    """
    os.execv(
        sys.executable,
        [sys.executable, "-m", "stratagem.coordinator.process.restore", *context.args],
    )
