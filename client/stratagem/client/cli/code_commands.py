"""Commands about code that travels with jobs: its digest, and signatures of it.

They read and write files on this machine and open no connection.
"""

from pathlib import Path
from typing import Annotated

import typer

from stratagem.client.cli.reporting import reporting
from stratagem.client.code.code_folder import bundle_of
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Digest
from stratagem.common.code.bundle import digest_of, make_keys
from stratagem.common.code.bundle import sign as signature_of
from stratagem.common.job import CodeSpec, load_job

code = typer.Typer(help="Code that travels with jobs.", no_args_is_help=True)

SourceArgument = Annotated[
    Path,
    typer.Argument(metavar="SOURCE", help="A job file, whose `code` is meant, or a folder."),
]


@code.command("digest")
def print_digest(source: SourceArgument = Path()) -> None:
    """Print the digest of code, as `--allow-code digests:FILE` of a worker lists it.

    It depends on the names and the contents of the files, and on nothing else.
    """
    with reporting():
        print(_digest_of(source))


@code.command("keygen")
def make_signing_keys(
    private: Annotated[Path, typer.Argument(metavar="FILE", help="The private key, a new file.")],
) -> None:
    """Make a pair of keys to sign code with: FILE and FILE.pub.

    FILE.pub belongs into the file that a worker's `--allow-code signed:FILE` names; several keys
    stand there one after another.
    """
    with reporting():
        public = private.with_name(f"{private.name}.pub")
        make_keys(private, public)
        print(f"{private}: the private key, for `stratagem code sign --key`")
        print(f"{public}: the public key, for workers")


@code.command("sign")
def sign(
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="Of `code keygen`.")],
    source: SourceArgument = Path(),
) -> None:
    """Print the signature of code, for `code.signature` of the job."""
    with reporting():
        print(signature_of(_digest_of(source), key))


def _digest_of(source: Path) -> Digest:
    if source.is_dir():
        return digest_of(bundle_of(CodeSpec(path=str(source))))
    spec = load_job(source).code
    if spec is None:
        raise InvalidInputError.at("code", f"{source} has none; add `code: .`")
    return spec.digest or digest_of(bundle_of(spec))
