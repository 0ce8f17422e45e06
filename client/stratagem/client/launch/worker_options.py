"""The options of a worker, by what their values are.

A launch refuses others before anything is handed over: workers that an engine starts, perhaps hours
later, would refuse them one by one. The settings themselves belong to the worker, which need not be
installed where a run is launched; a test compares them with these. Pure.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.schema.json import suggest

FLAGS: Final = frozenset(
    {
        *("--allow-insecure-network", "--ephemeral", "--log-json", "--metrics-tls"),
        *("--open-files", "--signed-states", "--tunnel"),
    }
)
"""Options without a value, each also as --no-..."""
INTEGERS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("--health-port", "--max-blob-memory-bytes", "--max-readers"), 0),
    **dict.fromkeys(("--max-calls", "--max-early-bytes", "--max-sessions", "--max-uploads"), 1),
    **dict.fromkeys(("--max-state-bytes", "--max-state-tensors", "--threads"), 1),
    "--metrics-port": 0,
}
"""Options whose value is a whole number, with the least one."""
MOST: Final[Mapping[str, int]] = dict.fromkeys(("--health-port", "--metrics-port"), 65535)
"""The greatest one, where there is one."""
SECONDS: Final = frozenset(
    {
        *("--abort-grace-s", "--compile-timeout-s", "--drain-grace-s", "--exchange-timeout-s"),
        *("--stall-report-s", "--stream-idle-timeout-s"),
    }
)
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "--data-plane": ("trusted", "tls"),
    "--log-level": ("debug", "info", "warning", "error"),
    "--mesh": ("auto", "shm", "nccl", "gloo", "grpc"),
    "--preempt-signal": ("USR1", "USR2", "HUP", "QUIT", "XCPU", "URG", ""),
    "--rendezvous": ("torchrun", "slurm", "kubernetes", "mpi", "env"),
}
TEXTS: Final = frozenset(
    {
        *("--activation-store", "--advertise", "--allow", "--allow-code", "--build-dir"),
        *("--coordinator", "--data-dir", "--data-root", "--device", "--for-run", "--import-path"),
        *("--listen", "--local-data", "--metrics-client-ca", "--metrics-deployment"),
        *("--metrics-tls-cert", "--metrics-tls-key", "--metrics-token-file", "--name", "--pool"),
        *("--previous-exit", "--privacy-secret", "--proxy", "--ready-file", "--revoked-file"),
        *("--site", "--state-folder", "--tags", "--tls-ca", "--tls-cert", "--tls-key"),
    }
)
"""Options whose value is any text here: what it names is on the nodes."""

_WITHOUT_VALUE: Final = FLAGS | {f"--no-{name.removeprefix('--')}" for name in FLAGS}
_KNOWN: Final = (*sorted(_WITHOUT_VALUE), *INTEGERS, *SECONDS, *CHOICES, *TEXTS)
_FIELD: Final = "--worker"


def names_of(words: Sequence[str]) -> frozenset[str]:
    """Return the names of the options; raises InvalidInputError for what a worker would refuse."""
    names, rest = set[str](), iter(words)
    for word in rest:
        name, has_value, value = word.partition("=")
        if name not in _KNOWN:
            what = "is no option of a worker" if name.startswith("-") else "belongs to no option"
            hint = suggest(name, _KNOWN) or "; `stratagem worker --help` lists them"
            raise InvalidInputError.at(_FIELD, f"{word[:80]!r} {what}{hint}")
        names.add(name)
        if name not in _WITHOUT_VALUE and not has_value:
            value = next(rest, "--")
            if value.startswith("--"):
                raise InvalidInputError.at(_FIELD, f"{name} needs a value, as in {name}=VALUE")
        if allowed := _why_not(name, value, has_value=bool(has_value)):
            raise InvalidInputError.at(_FIELD, f"{name} is {value[:80]!r}; allowed is {allowed}")
    return frozenset(names)


def _why_not(name: str, value: str, *, has_value: bool) -> str:
    """Return what is allowed in place of a value; "" where it is right."""
    if name in _WITHOUT_VALUE:
        return "no value" if has_value else ""
    if name in INTEGERS:
        least, most = INTEGERS[name], MOST.get(name)
        is_number = value.isascii() and value.isdecimal()
        if is_number and int(value) >= least and (most is None or int(value) <= most):
            return ""
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        return f"a whole number {bounds}"
    if name in SECONDS:
        return "" if _is_time(value) else "a number of seconds"
    if name in CHOICES:
        known = CHOICES[name]
        return "" if value in known else f"one of {', '.join(filter(None, known))}"
    return ""


def _is_time(text: str) -> bool:
    try:
        return isfinite(float(text)) and float(text) >= 0
    except ValueError:
        return False
