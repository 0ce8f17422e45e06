"""The command that writes a run's model in the form of another program."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, assert_never

import typer

from stratagem.client.cli.options import (
    CoordinatorOption,
    Format,
    FormatOption,
    RunArgument,
    WhichOption,
)
from stratagem.client.cli.progress import print_line
from stratagem.client.cli.query_commands import connected
from stratagem.client.cli.reporting import make_console
from stratagem.client.sdk.async_client import DEFAULT_ADDRESS
from stratagem.common.rpc.channel import PLAINTEXT, Proof


class Target(StrEnum):
    """What a model can be exported to."""

    HF = "hf"
    TORCH_EXPORT = "torch-export"
    ONNX = "onnx"


def export(  # noqa: PLR0913  (each parameter is an option of the command line)
    run_id: RunArgument,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Nothing may be there yet.")],
    to: Annotated[Target, typer.Option("--to", help="For which program.")],
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    which: WhichOption = "final",
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="Of hf: the largest file.")
    ] = "5GB",
    import_path: Annotated[
        list[Path] | None,
        typer.Option(
            "--import-path", metavar="DIR", help="Where your modules are; this folder if not set."
        ),
    ] = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Write the model of a run as other programs read it.

    The model is built on this machine by your code, so both it and torch have to be here.

    hf: a folder that from_pretrained loads; tied weights once, config.json of the model.
    torch-export: a file for torch.export.load. onnx: a file, which needs onnx and onnxscript here.
    In the last two the number of rows is free; they are run with two, and compared with the model.
    """
    with connected(coordinator, proof) as client:
        run = client.get(run_id)
        folders = import_path or ()
        difference = run.export(path, to.value, which, shard_size=shard_size, import_path=folders)
    written = {"path": str(path), "difference": difference}
    print_line(
        make_console(), _text(to, path, difference) if form is Format.TEXT else json.dumps(written)
    )


def _text(to: Target, path: Path, difference: float) -> str:
    match to:
        case Target.HF:
            return str(path)
        case Target.TORCH_EXPORT | Target.ONNX:
            return f"{path}: its outputs differ from the model's by at most {difference:.3g}"
        case _:
            assert_never(to)
