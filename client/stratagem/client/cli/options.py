"""The options that several commands share, each said once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from stratagem.client.client import DEFAULT_ADDRESS

DATA_DIR: Final = Path(".stratagem")


class Format(StrEnum):
    """text for people, json for programs (one object per line where output goes on)."""

    TEXT = "text"
    JSON = "json"


CoordinatorOption = Annotated[
    str,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        envvar="STRATAGEM_COORDINATOR",
        show_default=DEFAULT_ADDRESS,
        help="The coordinator to talk to.",
    ),
]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print.")]
LocalOption = Annotated[
    int | None,
    typer.Option(
        "--local",
        metavar="N",
        min=1,
        help="Use no server: start a coordinator and N workers for this command.",
    ),
]
DataDirOption = Annotated[
    Path, typer.Option("--data-dir", help="Where a local cluster keeps journal, states and logs.")
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The id of a run.")]
WhichOption = Annotated[
    str,
    typer.Option("--which", help="final (or the newest so far), best, or the number of a segment."),
]
