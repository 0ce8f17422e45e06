"""Define the commands that make proofs of identity: certificates for development, tokens for
people.

They write files on this machine and open no connection.
"""

import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from stratagem.client.cli.shared import as_command, complain, make_console
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.identity.callers import Scope, add_token, new_token, read_tokens, remove_token
from stratagem.common.identity.tls import DEFAULT_TRUST_DOMAIN, Role

certs = typer.Typer(help="Certificates for development.", no_args_is_help=True)
token = typer.Typer(help="Tokens that identify people.", no_args_is_help=True)

_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}

WorkersOption = Annotated[
    list[str] | None, typer.Option("--worker", metavar="NAME", help="Name of a worker; repeatable.")
]
PoolsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pool",
        metavar="NAME",
        help="Name of a pool (the workers' --pool), whose workers share one certificate; "
        "repeatable.",
    ),
]
ClientsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--client", metavar="NAME", help="Name of a client, such as a person; repeatable."
    ),
]
FolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="New folder for the certificates.")
]
DaysOption = Annotated[
    int | None,
    typer.Option(
        "--days",
        metavar="N",
        min=1,
        help="Validity of the certificates in days: 90 by default, and at most that of their "
        "authority.",
    ),
]
MadeArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder that `certs init` has made.")
]
TokensFileOption = Annotated[
    Path, typer.Option("--tokens-file", metavar="FILE", help="The coordinator's --tokens-file.")
]


@certs.command("init")
@as_command
def init_certs(
    folder: FolderArgument,
    worker: WorkersOption = None,
    pool: PoolsOption = None,
    client: ClientsOption = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="HOST",
            help="Name or address of the coordinator, besides loopback; repeatable.",
        ),
    ] = None,
    trust_domain: Annotated[
        str,
        typer.Option(
            "--trust-domain",
            metavar="WORD",
            help="Name that distinguishes this deployment from others.",
        ),
    ] = DEFAULT_TRUST_DOMAIN,
    days: DaysOption = None,
) -> None:
    """Create a certificate authority and certificates.

    The authority is valid for ten years, and signs the certificates. The coordinator, each worker
    and each client get DIR/NAME.crt and DIR/NAME.key, next to DIR/ca.crt. For development: whoever
    can read DIR/ca.key can issue more certificates. Nothing is overwritten.
    """
    from stratagem.common.identity.certificates import init

    made = init(
        folder,
        workers=worker or ([] if pool else ["w0"]),
        pools=pool or [],
        clients=client or ["me"],
        hosts=host or [],
        trust_domain=trust_domain,
        days=days,
    )
    _print_certificates(made)


@certs.command("issue")
@as_command
def issue_certs(
    folder: MadeArgument,
    worker: WorkersOption = None,
    pool: PoolsOption = None,
    client: ClientsOption = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace existing certificates and keys.")
    ] = False,
    days: DaysOption = None,
) -> None:
    """Issue or renew certificates of workers and clients.

    The authority in DIR signs them. With --renew and no names, all certificates in DIR are renewed,
    for the same names. Running processes pick up the new files. No certificate outlives its
    authority: a larger number of days is refused.
    """
    from stratagem.common.identity.certificates import issue

    made = issue(
        folder,
        workers=worker or [],
        pools=pool or [],
        clients=client or [],
        renew=renew,
        days=days,
    )
    _print_certificates(made)


@certs.command("renew-authority")
@as_command
def renew_authority_certs(folder: MadeArgument) -> None:
    """Create a new authority next to the old one.

    From then on DIR/ca.crt holds both, and the new one signs. Distribute that file, then renew the
    certificates (`certs issue DIR --renew`) and distribute the new files: meanwhile certificates of
    either authority are accepted, and nothing needs a restart. Finally run
    `certs retire-authority DIR`.
    """
    from stratagem.common.identity.certificates import renew_authority

    _print_certificates([renew_authority(folder)])


@certs.command("retire-authority")
@as_command
def retire_authority_certs(folder: MadeArgument) -> None:
    """Remove the authority that no longer signs.

    It is removed from DIR/ca.crt, which you then distribute: wherever that file is used,
    certificates signed by the old authority are no longer accepted. Refused while DIR still holds
    such a certificate.
    """
    from stratagem.common.identity.certificates import retire_authority

    _print_certificates([retire_authority(folder)])


@certs.command("show")
@as_command
def show_certs(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Certificate file, or folder of certificates."),
    ],
) -> None:
    """Print who certificates belong to, and when they expire."""
    folders = (sorted(path.glob("*.crt")) if path.is_dir() else [path] for path in files)
    _print_certificates([certificate for folder in folders for certificate in folder])


@certs.command("revoke")
@as_command
def revoke_certs(
    holders: Annotated[
        list[str],
        typer.Argument(
            metavar="ROLE/NAME|FILE",
            help="Holder, such as worker/w3 or client/alice, or a certificate file.",
        ),
    ],
    revoked_file: Annotated[
        Path,
        typer.Option(
            "--revoked-file",
            metavar="FILE",
            help="The --revoked-file of the coordinator and the workers.",
        ),
    ],
) -> None:
    """Revoke certificates.

    Takes effect with the next call, wherever the file is in use. A name revokes every certificate
    of that name, including later ones; a certificate file revokes only that certificate.
    """
    from stratagem.common.identity.callers import add_revoked, fingerprint

    named = [
        fingerprint(Path(holder).read_bytes()) if Path(holder).is_file() else _holder(holder)
        for holder in holders
    ]
    add_revoked(revoked_file, named)
    complain(f"{revoked_file} names: {', '.join(named)}")


@token.command("create")
@as_command
def create_token(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name of the token's holder, which the journal records."
        ),
    ],
    tokens_file: TokensFileOption,
    scopes: Annotated[
        str,
        typer.Option(
            "--scopes",
            metavar="SCOPE[,SCOPE]",
            help="read, submit or admin; each includes the ones before it.",
        ),
    ] = Scope.SUBMIT,
    expires: Annotated[
        str,
        typer.Option(
            "--expires", metavar="TIME", help="Lifetime of the token, such as 12h or 30d, or never."
        ),
    ] = "90d",
) -> None:
    """Create a token and print it once.

    The file keeps only its hash, name, scopes and expiry. A running coordinator picks it up at
    once.
    """
    wanted = [_scope(part) for part in scopes.split(",")]
    seconds = _seconds(expires)
    secret, record = new_token(name, wanted, None if seconds is None else time.time() + seconds)
    add_token(tokens_file, record)
    complain(f"token {name} is in {tokens_file}; it is not shown again:")
    print(secret)


@token.command("list")
@as_command
def list_tokens(tokens_file: TokensFileOption) -> None:
    """Print names, scopes and expiry of the tokens in a file."""
    table = Table("name", "scopes", "expires", box=None, pad_edge=False)
    for read_token in read_tokens(tokens_file):
        table.add_row(read_token.name, ", ".join(read_token.scopes), _when(read_token.expires_s))
    make_console().print(table if table.row_count else "no tokens")


@token.command("revoke")
@as_command
def revoke_token(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name with which the token was created.")
    ],
    tokens_file: TokensFileOption,
) -> None:
    """Revoke a token.

    A running coordinator refuses it from the next call on.
    """
    remove_token(tokens_file, name)
    complain(f"token {name} is revoked")


def _print_certificates(files: list[Path]) -> None:
    from stratagem.common.identity.certificates import show

    for certificate in (cert for file in files for cert in show(file)):
        who = f"{certificate.role or 'no role'} {certificate.name}".rstrip()
        expired = ", EXPIRED" if certificate.has_expired else ""
        print(f"{certificate.file}: {who}, until {certificate.expires:%Y-%m-%d %H:%M} UTC{expired}")
        names = ", ".join((*certificate.uris, *certificate.hosts))
        print(f"    {names or certificate.fingerprint}")


def _holder(word: str) -> str:
    """Convert a holder such as worker/w3, or a fingerprint, to an entry of a revocation list."""
    if word.startswith("sha256:"):
        return word
    role, _, name = word.partition("/")
    if role not in list(Role) or not name:
        forms = ", ".join((*(f"{kind}/NAME" for kind in Role), "sha256:HEX"))
        raise InvalidInputError.at("holders", f"{word!r} is neither a file nor one of {forms}")
    return f"{role} {name}"


def _scope(word: str) -> Scope:
    try:
        return Scope(word.strip())
    except ValueError:
        message = f"{word.strip()!r} is not one of {', '.join(Scope)}"
        raise InvalidInputError.at("scopes", message) from None


def _seconds(expires: str) -> float | None:
    if expires == "never":
        return None
    span = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", expires)
    if span is None:
        raise InvalidInputError.at("expires", f"{expires!r} is not a time such as 12h or 30d")
    return int(span[1]) * _UNITS_S[span[2]]


def _when(expires_s: float | None) -> str:
    if expires_s is None:
        return "never"
    return f"{datetime.fromtimestamp(expires_s, UTC):%Y-%m-%d %H:%M} UTC"
