"""Define the commands about a job before and after its run: check, memory planning, export, and
code signatures.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, cast

import typer

from stratagem.client.cli.run import JobArgument, SetOption
from stratagem.client.cli.shared import (
    FAILED,
    Access,
    AccessOptions,
    Format,
    FormatOption,
    OptionalCoordinatorOption,
    ProofOptions,
    RunArgument,
    WhichOption,
    as_command,
    complain,
    make_console,
    print_line,
)
from stratagem.client.course.views import Worker
from stratagem.client.sdk.torch_process import check_job, estimate_memory, import_folders
from stratagem.client.sdk.torch_process import recommend as recommend_settings
from stratagem.client.sinks.sink import sink_names, sink_of
from stratagem.client.terminal import tables
from stratagem.client.terminal.completion import sink_forms
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Digest
from stratagem.common.base.units import size_bytes
from stratagem.common.job import CodeSpec, load_job
from stratagem.common.observe.findings import Finding, Level
from stratagem.common.rpc.channel import PLAINTEXT, Proof
from stratagem.common.schema.json import not_one_of

if TYPE_CHECKING:
    from stratagem.client.sdk.blocking import RunHandle
    from stratagem.client.sdk.downloads import ExportedModel

# ---- Planning ----
#
# These commands estimate how much memory a job will need, and recommend settings that fit. They
# submit nothing and need no coordinator; the model is built on this machine, in a process of its
# own.

DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", metavar="NAME", help="cpu or cuda; by default, what this machine has."
    ),
]


def estimate(
    job_path: JobArgument,
    overrides: SetOption = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            min=1,
            help="Number of workers that share the job; by default, as many as the strategy has "
            "room for.",
        ),
    ] = None,
    inference: Annotated[
        bool,
        typer.Option("--inference", help="Estimate inference over one batch instead of training."),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Run a few real steps on this machine, and correct the estimate by them.",
        ),
    ] = False,
    device: DeviceOption = "",
    form: FormatOption = Format.TEXT,
) -> None:
    """Estimate how much memory a worker of this job will need.

    The steps are run with tensors that have shapes but no memory, so the model may be larger than
    this machine's memory. Shapes come from one row of the job's data.
    """
    memory = estimate_memory(
        load_job(job_path, overrides or []),
        num_workers=workers,
        inference=inference,
        measure=measure,
        device=device,
        import_path=import_folders(job_path),
    )
    print(json.dumps(asdict(memory)) if form is Format.JSON else memory)


def recommend(  # noqa: PLR0913  (each parameter is an option of the command line)
    job_path: JobArgument,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory of each worker, such as 8GB or 512MiB; with --coordinator, by default "
            "what its workers have.",
        ),
    ] = None,
    overrides: SetOption = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            min=1,
            help="Number of workers; by default 1, or with --coordinator all of its workers.",
        ),
    ] = None,
    coordinator: OptionalCoordinatorOption = None,
    proof: ProofOptions = PLAINTEXT,
    device: DeviceOption = "",
    form: FormatOption = Format.TEXT,
) -> None:
    """Find settings with which a job fits its workers' memory.

    Exit code: 0 if it fits, 1 if no settings make it fit.
    """
    settings = recommend_settings(
        load_job(job_path, overrides or []),
        memory_bytes=None if memory is None else size_bytes(memory, "memory"),
        num_workers=workers,
        workers=workers_of(coordinator, proof),
        device=device,
        import_path=import_folders(job_path),
    )
    if form is Format.JSON:
        print(json.dumps(asdict(settings)))
    else:
        print("\n".join(settings.reasons))
        print(f"execution: {json.dumps(settings.execution)}")
        print(f"strategy: {json.dumps(settings.strategy)}")
        print(settings.estimate)
    if not settings.fits:
        raise typer.Exit(1)


def workers_of(coordinator: str | None, proof: Proof) -> tuple[Worker, ...] | None:
    """Return the registered workers of a coordinator; None if no coordinator is named."""
    if coordinator is None:
        return None
    with Access(coordinator, proof).client() as client:
        return tuple(client.workers())


# ---- Check ----


def check(
    job_path: JobArgument,
    overrides: SetOption = None,
    coordinator: OptionalCoordinatorOption = None,
    proof: ProofOptions = PLAINTEXT,
    device: DeviceOption = "",
    form: FormatOption = Format.TEXT,
) -> None:
    """Check a job, and report all errors, before it is submitted.

    Tries a little of each part on this machine, in a separate process: all fields, all entry
    points, the model with its groups, the data (created twice and compared), some rows from across
    each split, one real step (with partition_state two more, as a worker that keeps a slice), a
    step from a saved state, the metrics, and how much memory is needed. Errors that only other rows
    or later steps cause are found only by the run itself. Nothing is submitted.

    As text, each result is printed as soon as it is found; as JSON, all are printed together. If
    something takes long, the command prints what it is doing and where, also on Ctrl-C.

    Exit code: 0 if there are no errors (there may be warnings), else 1.
    """
    so_far, console = list[Finding](), make_console()

    def tell(finding: Finding) -> None:
        so_far.append(finding)
        if form is Format.TEXT:
            tables.print_finding(console, finding, is_first=len(so_far) == 1)

    workers = workers_of(coordinator, proof)
    try:
        check_job(
            lambda: load_job(job_path, overrides or []),
            workers=workers,
            device=device,
            import_path=import_folders(job_path),
            tell=tell,
            complain=complain,
        )
    finally:
        if form is Format.JSON:
            print(tables.many_to_json(so_far))
    if any(finding.level is Level.FAIL for finding in so_far):
        raise typer.Exit(FAILED)


# ---- Export ----
#
# The command writes a run's model or history in the form of another program.

ModelForm = Literal["hf", "torch-export", "onnx"]
MODEL_FORMS: Final = ("hf", "torch-export", "onnx")


def _forms(incomplete: str) -> list[str]:
    """Return the completions of FORM:TARGET, the option of an export, for an incomplete word."""
    forms = [f"{name}:" for name in MODEL_FORMS]
    return [*(form for form in forms if form.startswith(incomplete)), *sink_forms(incomplete)]


def export(  # noqa: PLR0913  (each parameter is an option of the command line)
    run_id: RunArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORM:TARGET",
            help="Form of the export, and where to write it.",
            autocompletion=_forms,
        ),
    ],
    access: AccessOptions,
    which: WhichOption = "final",
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="For hf: maximum size of a file.")
    ] = "5GB",
    import_path: Annotated[
        list[Path] | None,
        typer.Option(
            "--import-path",
            metavar="DIR",
            help="Folder with your modules; by default the current folder; repeatable.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="For a history: keep writing until the run ends.")
    ] = False,
    form: FormatOption = Format.TEXT,
) -> None:
    """Export the model or the history of a run for other programs.

    A model is built on this machine by your code, so both your code and torch must be installed
    here, and the target must not exist yet. hf:FOLDER is for from_pretrained, with tied weights
    stored once and the config.json of the model. torch-export:FILE is for torch.export.load.
    onnx:FILE requires onnx and onnxscript here. In the last two the number of rows is dynamic; the
    exported model is run with two rows, and compared with the original.

    A history holds the steps and the evaluations: csv:FILE, jsonl:FILE, tensorboard:FOLDER,
    mlflow:URI, wandb:PROJECT. An existing history of the run is completed.

    Exit code: 1 also if a history is not written completely.
    """
    name, _, target = to.partition(":")
    with access.client() as client:
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


def _export_history(run: "RunHandle", to: str, form: Format, *, follow: bool) -> None:
    from stratagem.client.sinks.outlet import LogOutlets

    with LogOutlets(run, {to: sink_of(to)}, complain) as outlets:
        for item in run.watch(run.status().event_index) if follow else ():
            outlets.take(item)
    if outlets.problems:
        raise typer.Exit(FAILED)
    text = to if form is Format.TEXT else json.dumps({"to": to})
    print_line(make_console(), text)


def _texts(name: str, written: "ExportedModel") -> Iterator[str]:
    if name == "hf":
        yield str(written.path)
        return
    difference = f"{written.difference:.3g}"
    yield f"{written.path}: its outputs differ from the model's by at most {difference}"
    takes = ", ".join(written.inputs)
    yield f"takes {takes}: any number of rows; the other sizes are fixed to those of the data"


# ---- Code ----
#
# These commands compute the digest of code that travels with jobs, and sign it. They read and
# write files on this machine and open no connection.

code = typer.Typer(help="Code that travels with jobs.", no_args_is_help=True)

SourceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE", help="Job file that names the code under `code`, or a folder of code."
    ),
]


@code.command("digest")
@as_command
def print_digest(source: SourceArgument = Path()) -> None:
    """Print the digest of code.

    Workers with `--allow-code digests:FILE` accept code whose digest is in FILE. A digest depends
    only on the names and the contents of the files.
    """
    print(_digest_of(source))


@code.command("keygen")
@as_command
def make_signing_keys(
    private: Annotated[Path, typer.Argument(metavar="FILE", help="New file for the private key.")],
) -> None:
    """Create a key pair to sign code with: FILE and FILE.pub.

    Add FILE.pub to the file that a worker's `--allow-code signed:FILE` names; that file may hold
    several keys, one after another.
    """
    public = private.with_name(f"{private.name}.pub")
    from stratagem.common.code.signatures import make_keys

    make_keys(private, public)
    print(f"{private}: the private key, for `stratagem code sign --key`")
    print(f"{public}: the public key, for workers")


@code.command("sign")
@as_command
def sign(
    key: Annotated[
        Path, typer.Option("--key", metavar="FILE", help="Private key made by `code keygen`.")
    ],
    source: SourceArgument = Path(),
) -> None:
    """Print the signature of code, for `code.signature` of the job."""
    from stratagem.common.code.signatures import sign

    print(sign(_digest_of(source), key))


def _digest_of(source: Path) -> Digest:
    from stratagem.client.sdk.code_folder import bundle_of
    from stratagem.common.code.bundle import digest_of

    if source.is_dir():
        return digest_of(bundle_of(CodeSpec(path=str(source))))
    spec = load_job(source).code
    if spec is None:
        raise InvalidInputError.at("code", f"{source} has none; add `code: .`")
    return spec.digest or digest_of(bundle_of(spec))
