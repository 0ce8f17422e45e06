"""The error catalogue: classes and statuses from the code, causes and advice from here.

Each cause begins with words of the sentence that people see, … standing for what differs; a test
finds them in the code. Owns the causes; knows no page.
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from inspect import getdoc

from stratagem.common.base import errors
from stratagem.common.base.errors import StratagemError
from stratagem.common.rpc.status_codes import code_of
from tests.house.source import nodes, product_files

ONLY_A_BASE = ("StratagemError",)
AGAIN: Mapping[str, str] = {
    "InvalidInputError": "no; correct the input",
    "OutOfRangeError": "no; ask where it ends",
    "UnfitModelError": "no; change the job, or name another model",
    "LimitError": "no; ask for less, or raise the limit; if others use the room, later",
    "DivergedError": "no; lower the setting that it names, and submit again",
    "IntegrityError": "automatic for a transfer; no for a damaged file",
    "StaleError": "no; something newer has taken its place",
    "NotFoundError": "no",
    "SoleCopyLostError": "no",
    "ConflictError": "yes, when the other one is done",
    "AlreadyExistsError": "no; take another name",
    "WrongStateError": "no; change the state first",
    "UnauthenticatedError": "no; show a certificate or a token",
    "PermissionDeniedError": "no; use another identity, or have the right granted",
    "RefusedBySiteError": "no; change the job, or have the site change its file",
    "SiteClosedError": "automatic, once the site has opened",
    "BudgetSpentError": "no; the budget stays spent",
    "KeysLostError": "no; the round goes on without the client, or restarts with new keys",
    "UnavailableError": "yes; automatic in SDK and command line after a first answer",
    "StandbyError": "automatic in SDK, command line and workers, at the leader",
    "InProgressError": "automatic in SDK and command line, until it is done",
    "UserCodeError": "no; correct the code, then submit or `stratagem resume`",
    "RunFailedError": "no; read the reason, then `stratagem resume`",
}
"""The advice on repeating the same call, by class."""

CAUSES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "InvalidInputError": (
        (
            "… is not one of …",
            "take one of the listed words",
        ),
        (
            "does not parse as the message of this call",
            "run one version of client and server",
        ),
        (
            "… can be reached from other machines",
            "give certificates (`--tls-ca` and the like), or `--allow-insecure-network`",
        ),
        ("… has no implementation here; registered are …", "install the strategy's package"),
        ("… is built in and reads no config", "name it as the `type`, not as a coordinator"),
        (
            "is not allowed on this worker, which allows: …",
            "add the entry point to the workers' `--allow`",
        ),
    ),
    "OutOfRangeError": (
        ("… is beyond the newest event, …", "watch from an index that the run has reached"),
        (
            "… is beyond the end at …",
            "begin the transfer again",
        ),
    ),
    "UnfitModelError": (
        (
            "… fits no tensor of the model; the first are …",
            "print `list(model.state_dict())`, and write patterns that fit these names",
        ),
    ),
    "LimitError": (
        ("job_json: … bytes, the limit is …", "put data into files, or raise `--max-job-bytes`"),
        ("… runs are active, the limit is …", "stop some, wait, or raise `--max-active-runs`"),
        ("relay: … streams …, the limit is …", "give each worker its own `--name`, or run fewer"),
        (
            "early messages: …",
            "nothing: a member is far behind, and the step is repeated",
        ),
    ),
    "DivergedError": (
        (
            "beyond the range of …",
            "updates, averages or moments grew without bounds: lower the named setting, or clip;"
            " the run can continue from an earlier commit",
        ),
    ),
    "IntegrityError": (
        ("chunk at …: wrong CRC32C", "bytes were changed in transit: check memory and network"),
        (
            "blob … is damaged: …",
            "the coordinator's disk has lost data: restore a backup, or resume from another state",
        ),
        ("the journal is damaged", "restore a backup"),
        (
            "the members' gradients are laid out differently",
            "the model differs between workers: install one version of your code",
        ),
    ),
    "StaleError": (
        (
            "a later upload of the same client has taken the place of this one",
            "nothing: the later one counts",
        ),
        ("membership … is older than …", "nothing: the party has other members by now"),
        ("run … has ended", "nothing: the report came too late"),
    ),
    "SoleCopyLostError": (
        (
            "what this worker alone had of segment … is not here any more",
            "nothing: all replicas return to the last commit that was uploaded as a whole",
        ),
    ),
    "NotFoundError": (
        ("run … is not known", "see `stratagem list`; it may be another coordinator"),
        ("run … has no state …; kept are …", "older states are deleted: raise `retention`"),
        ("run … has committed nothing yet", "wait for its first commit"),
        ("data.inline: no data set … was uploaded", "submit through the SDK, which uploads first"),
        ("this worker has no local data …", "start the worker with `--local-data NAME=FILE`"),
        ("worker … is not registered (any more)", "nothing: it registers again by itself"),
    ),
    "ConflictError": (
        ("the content of the stream changed while it was resumed", "nothing: it starts again"),
        ("another local cluster uses …", "name another folder with `--data-dir`"),
        ("the party re-forms; step … will be done again", "nothing"),
    ),
    "AlreadyExistsError": (
        ("run … exists with another job", "leave out `--run-id`, or take another one"),
        ("worker … lives at …; choose another name", "give each worker its own `--name`"),
    ),
    "WrongStateError": (
        ("run … is active; stop it first", "`stratagem stop RUN`"),
        (
            "this coordinator takes no tunnels",
            "start it without `--relay off`, or the worker without `--tunnel`",
        ),
        ("protocol version: this side speaks …", "run one version everywhere: `stratagem doctor`"),
    ),
    "UnauthenticatedError": (
        (
            "the caller has shown neither a certificate nor a token",
            "`--tls-cert` or `--token-file`",
        ),
        ("the token is not known here", "it was revoked, or belongs to another coordinator"),
        ("token … has expired at …", "make a new one: `stratagem token create`"),
    ),
    "PermissionDeniedError": (
        (
            "…: it is for …, and the caller is …",
            "see [who may do what](../explanation/security.md#who-may-do-what); ask for a token"
            " with that scope",
        ),
        ("… speaks for worker …", "a worker's `--name` must be the one in its certificate"),
    ),
    "RefusedBySiteError": (
        (
            "site … refuses: …",
            "it names the nearest rule of [the site's file](../how-to/site-file.md), and the field",
        ),
    ),
    "KeysLostError": (
        (
            "the worker of client … has no keys of round …",
            "give workers a data folder: `--data-dir`; see [drop-outs]"
            "(../explanation/secure-aggregation.md#drop-outs-and-crashes)",
        ),
    ),
    "SiteClosedError": (
        ("site … is closed: …", "nothing: the site takes part again when its window opens"),
    ),
    "BudgetSpentError": (
        (
            "privacy budget: … spent in … rounds, and one more would cost …",
            "nothing: the run continues with the other clients, and ends when none has budget left",
        ),
    ),
    "UnavailableError": (
        ("no coordinator answers at …", "`stratagem doctor` examines the connection"),
        (
            "nobody answers at … as worker …",
            "check the worker's `--advertise`, port and network",
        ),
        (
            "worker … keeps no tunnel open",
            "the worker's log says what keeps it from the coordinator; calls are made again once it"
            " is back",
        ),
        ("worker … is lost", "nothing: the work is done elsewhere"),
        ("worker … is draining", "nothing: it was told to stop"),
        ("the coordinator's disk is full", "make room"),
        ("spool: an update of … does not fit", "make room and raise `--max-spool-bytes`"),
        ("the journal cannot be used now", "make room, free the file, or start the database"),
        ("cannot listen on …: is the port taken?", "another process has the port: set `--listen`"),
        ("object store: …", "check the store's endpoint, keys and network"),
    ),
    "StandbyError": (
        ("… stands by: … leads", "name all coordinators: `--coordinator A:7070,B:7070`"),
        (
            "waits for the lead",
            "nothing: the silent leader is replaced after `--lease-ttl-s`",
        ),
    ),
    "InProgressError": (
        (
            "… is being made to stay in the store, …",
            "nothing: the run is submitted when the copying is over",
        ),
    ),
    "UserCodeError": (
        (
            "non-finite …",
            "lower the learning rate, clip, or set `accumulation.non_finite: skip_step`",
        ),
        ("cannot be found: no module", "add its folder to the workers' `--import-path`"),
    ),
    "RunFailedError": (
        ("… has ended … worker processes", "read the workers' logs; often it is memory"),
        (
            ", deadline passed",
            "take more clients, a longer deadline, or a lower quorum",
        ),
    ),
}
"""Words that people see and what to do about them, by class."""


@cache
def classes() -> tuple[type[StratagemError], ...]:
    """The tree, base before derived, as they stand in the code."""
    found = [each for each in vars(errors).values() if isinstance(each, type)]
    return tuple(each for each in found if issubclass(each, StratagemError))


def catalogue() -> str:
    """A section for each class that people meet."""
    return "\n\n".join(_section(each) for each in classes() if each.__name__ not in ONLY_A_BASE)


def _section(kind: type[StratagemError]) -> str:
    name, (base, *_) = kind.__name__, kind.__bases__
    below = "" if base is StratagemError else f", a [`{base.__name__}`](#{base.__name__.lower()})"
    meaning = " ".join((getdoc(kind) or "").split())
    lines = (
        f"### {name}",
        f"`{_code(kind)}`{below}. {meaning} Retry: {AGAIN[name]}.",
        "\n".join(f"- `{seen}` → {what}" for seen, what in CAUSES[name]),
    )
    return "\n\n".join(lines)


def _code(kind: type[StratagemError]) -> str:
    """Errors are made without their constructors, which differ."""
    code = code_of(kind.__new__(kind))
    assert code is not None, kind
    return code.name


# ---- for the test ----


@cache
def sentences() -> str:
    """All texts of the code, one a line; what is filled in stands as …"""
    return "\n".join(text for path in product_files() for text in _texts(nodes(path)))


def _texts(every: Sequence[ast.AST]) -> Iterator[str]:
    docstrings = {id(node.value) for node in every if isinstance(node, ast.Expr)}
    for node in every:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                yield " ".join(node.value.split())
        elif isinstance(node, ast.JoinedStr):
            parts = (str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values)
            yield " ".join("".join(parts).split())


RENDERED: Mapping[str, Callable[[], str]] = {"errors": catalogue}
"""The makers of the parts by the names of their markers."""
