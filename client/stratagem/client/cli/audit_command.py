"""The command that checks the audit of a site.

It reads a file on this machine and opens no connection.
"""

from pathlib import Path
from typing import Annotated

import typer

from stratagem.client.cli.reporting import reporting
from stratagem.common.base.errors import IntegrityError, InvalidInputError
from stratagem.common.base.text import counted
from stratagem.common.identity.audit import check_lines, hashes

audit = typer.Typer(help="The audit that a site keeps.", no_args_is_help=True)


@audit.callback()
def _audit() -> None:
    pass


@audit.command("verify")
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The audit, such as audit.jsonl.")],
    head: Annotated[
        str, typer.Option(metavar="HASH", help="A last hash noted earlier, which must be in it.")
    ] = "",
) -> None:
    """Check that no line of an audit was changed, removed or put in; name the first one that was.

    The last lines can be cut off unseen: note the last hash elsewhere, and give it as --head later.
    """
    with reporting():
        try:
            with file.open("rb") as lines:
                checked = check_lines(lines)
            if head and not _has(file, head):
                raise IntegrityError(f"no line has the hash {head}: lines that were there are gone")
        except OSError as error:
            raise InvalidInputError(f"{file}: {error.strerror}") from None
        except IntegrityError as error:
            raise IntegrityError(f"{file}: {error}") from None
        print(
            f"{file}: {counted(checked.num_lines, 'line')}, none changed; last hash {checked.head}"
        )
        if checked.num_torn:
            print(
                f"a crash has cut off a line {counted(checked.num_torn, 'time')}, as it says there"
            )
        if checked.is_torn:
            print("it ends in a line that a crash has cut off: nothing of that has left the site")


def _has(file: Path, head: str) -> bool:
    with file.open("rb") as lines:
        return head in hashes(lines)
