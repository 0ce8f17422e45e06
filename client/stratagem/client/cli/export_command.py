"""The command that writes a run in the form of another program: its model, or its history."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal, cast

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
from stratagem.client.cli.reporting import FAILED, complain, make_console
from stratagem.client.sdk.async_client import DEFAULT_ADDRESS
from stratagem.client.sdk.downloads import ExportedModel
from stratagem.client.sdk.run_handle import RunHandle
from stratagem.client.sinks.registry import sink_names, sink_of
from stratagem.client.sinks.run_outlets import LogOutlets
from stratagem.client.terminal.completion import sink_forms
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.rpc.channel import PLAINTEXT, Proof
from stratagem.common.schema.json import not_one_of

ModelForm = Literal["hf", "torch-export", "onnx"]
MODEL_FORMS: Final = ("hf", "torch-export", "onnx")


def _forms(incomplete: str) -> list[str]:
    """Return the beginnings of what names a form and its target."""
    forms = [f"{name}:" for name in MODEL_FORMS]
    return [*(each for each in forms if each.startswith(incomplete)), *sink_forms(incomplete)]


def export(  # noqa: PLR0913  (each parameter is an option of the command line)
    run_id: RunArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORM:TARGET",
            help="In which form, and where.",
            autocompletion=_forms,
        ),
    ],
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
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Of a history: go on until the run ends.")
    ] = False,
    form: FormatOption = Format.TEXT,
) -> None:
    """Write a run's model or history for other programs.

    A model is built on this machine by your code, so both it and torch have to be here, and
    nothing may be there yet. hf:FOLDER, which from_pretrained loads; tied weights once, config.json
    of the model. torch-export:FILE, for torch.export.load. onnx:FILE, which needs onnx and
    onnxscript here. In the last two the number of rows is free; they are run with two, and compared
    with the model.

    The history of the steps, with evaluations: csv:FILE, jsonl:FILE, tensorboard:FOLDER,
    mlflow:URI, wandb:PROJECT. What is there already of the run is completed.

    Exit code: 1 also where a history is not written to its end.
    """
    name, _, target = to.partition(":")
    with connected(coordinator, proof) as client:
        if name not in (*MODEL_FORMS, *sink_names()):
            raise InvalidInputError.at("--to", not_one_of(name, [*MODEL_FORMS, *sink_names()]))
        if not target:
            raise InvalidInputError.at("--to", f"{to!r} names no target; write {name}:TARGET")
        if name not in MODEL_FORMS:
            _export_history(client.get(run_id), to, form, follow=follow)
            return
        run, path = client.get(run_id), Path(target)
        written = run.export(
            path,
            cast(ModelForm, name),
            which,
            shard_size=shard_size,
            import_path=import_path or (),
        )
    said = {"path": str(path), "difference": written.difference, "inputs": written.inputs}
    for text in _texts(name, written) if form is Format.TEXT else [json.dumps(said)]:
        print_line(make_console(), text)


def _export_history(run: RunHandle, to: str, form: Format, *, follow: bool) -> None:
    with LogOutlets(run, {to: sink_of(to)}, complain) as outlets:
        for item in run.watch(run.status().event_index) if follow else ():
            outlets.take(item)
    if outlets.problems:
        raise typer.Exit(FAILED)
    text = to if form is Format.TEXT else json.dumps({"to": to})
    print_line(make_console(), text)


def _texts(name: str, written: ExportedModel) -> Iterator[str]:
    if name == "hf":
        yield str(written.path)
        return
    difference = f"{written.difference:.3g}"
    yield f"{written.path}: its outputs differ from the model's by at most {difference}"
    takes = ", ".join(written.inputs)
    yield f"takes {takes}: any number of rows; the other sizes are fixed to those of the data"
