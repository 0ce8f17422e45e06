"""The options that several commands share, each said once."""

import inspect
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from stratagem.client.cli.reporting import reporting
from stratagem.client.local.local_cluster import local_names
from stratagem.client.sdk.async_client import ADDRESS_VARIABLE, DEFAULT_ADDRESS
from stratagem.client.terminal.completion import run_ids, sink_forms
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.identity.tls import tls_files
from stratagem.common.rpc.channel import Proof
from stratagem.common.schema.json import not_one_of

DATA_DIR: Final = Path(".stratagem")


class Format(StrEnum):
    """text for people, json for programs (one object per line where output goes on)."""

    TEXT = "text"
    JSON = "json"


CoordinatorOption = Annotated[
    str,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT[,HOST:PORT]",
        envvar=ADDRESS_VARIABLE,
        show_default=DEFAULT_ADDRESS,
        help="The coordinator to talk to, or several of which one leads.",
    ),
]
OptionalCoordinatorOption = Annotated[
    str | None,
    typer.Option(
        "--coordinator", metavar="HOST:PORT", help="Also ask this one, which workers there are."
    ),
]
"""Of commands that do their work without a coordinator."""
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
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="T",
        min=1,
        show_default="OMP_NUM_THREADS, else 1",
        help="Threads of each worker: several for a large model. Runs have the same bits only with "
        "the same number.",
    ),
]
TagOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tag",
        metavar="[WORKER=]TAG",
        help="A tag of one local worker (worker-0, worker-1, ...) or of all; repeatable.",
    ),
]
DataDirOption = Annotated[
    Path,
    typer.Option(
        "--data-dir", metavar="DIR", help="Where a local cluster keeps journal, states and logs."
    ),
]
TlsCaOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        envvar="STRATAGEM_TLS_CA",
        help="Certificates of the authorities that may vouch for the coordinator.",
    ),
]
TlsCertOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert", metavar="FILE", envvar="STRATAGEM_TLS_CERT", help="Your certificate."
    ),
]
TlsKeyOption = Annotated[
    Path | None,
    typer.Option("--tls-key", metavar="FILE", envvar="STRATAGEM_TLS_KEY", help="Its key."),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        envvar="STRATAGEM_TOKEN_FILE",
        help="A token of yours, in place of a certificate.",
    ),
]
WebOption = Annotated[
    bool,
    typer.Option("--web", help="Also show it on a page in the browser, while this command runs."),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The id of a run.", autocompletion=run_ids)
]
RunsArgument = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", help="The ids of runs.", autocompletion=run_ids),
]
WhichOption = Annotated[
    str,
    typer.Option(
        "--which",
        metavar="WHICH",
        help="final (or the newest so far), best, the number of a segment, average, or "
        "predictions.",
    ),
]
LogToOption = Annotated[
    list[str] | None,
    typer.Option(
        "--log-to",
        metavar="SINK:TARGET",
        help="Log the steps to csv:FILE, jsonl:FILE, tensorboard:FOLDER, mlflow:URI or "
        "wandb:PROJECT; repeatable.",
        autocompletion=sink_forms,
    ),
]

_PROOF: Final = {
    "tls_ca": TlsCaOption,
    "tls_cert": TlsCertOption,
    "tls_key": TlsKeyOption,
    "token_file": TokenFileOption,
}


def tag_arguments(tags: Sequence[str], num_workers: int) -> dict[str, tuple[str, ...]]:
    """Arguments for each worker of a local cluster, from TAG (of all) and WORKER=TAG (of one)."""
    names = local_names(num_workers)
    tags_by_worker: dict[str, list[str]] = {name: [] for name in names}
    for pair in tags:
        worker, _, tag = pair.rpartition("=")
        if worker and worker not in tags_by_worker:
            raise InvalidInputError.at("--tag", f"{not_one_of(worker, names)}")
        if not tag:
            raise InvalidInputError.at("--tag", f"{pair!r} holds no tag")
        for name in [worker] if worker else names:
            tags_by_worker[name].append(tag)
    return {name: ("--tags", ",".join(of_one)) for name, of_one in tags_by_worker.items() if of_one}


def with_proof(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options that make its parameter `proof`, after `coordinator`."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    shown: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.name != "proof":
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        if parameter.name == "coordinator":
            shown += [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
                )
                for name, annotation in _PROOF.items()
            ]

    def call(**given: Any) -> None:
        ca, cert, key, token_file = (given.pop(name) for name in _PROOF)
        with reporting():
            proof = Proof(tls_files(ca, cert, key, needs_cert=False), token_file)
        command(**given, proof=proof)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {option.name: option.annotation for option in shown}
    call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return call
