"""What a launch knows of the options of a worker: as much as the worker does."""

import shlex
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le

from stratagem.client.launch.workers import CHOICES, FLAGS, INTEGERS, MOST, SECONDS, TEXTS, names_of
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.observe.logs import LEVELS
from stratagem.common.process.process import flag
from stratagem.worker.process.settings import PREEMPT_SIGNALS, WorkerSettings

PORTS = "allowed is a whole number from 0 to 65535"
FIELDS = {flag(name): field for name, field in WorkerSettings.model_fields.items()}
CHECKED_TEXTS = {"--log-level": tuple(LEVELS), "--preempt-signal": (*PREEMPT_SIGNALS, "")}
"""Settings that are text, of which the worker takes some."""


def kind_of(annotation: Any) -> Any:
    """A type without None."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (each for each in get_args(annotation) if each is not type(None))
    return annotation


def of_kind(*kinds: Any) -> set[str]:
    return {name for name, field in FIELDS.items() if kind_of(field.annotation) in kinds}


def test_a_launch_knows_the_options_that_a_worker_has() -> None:
    """A new setting of the worker belongs into `worker_options` too, by what its values are."""
    assert set(FIELDS) == FLAGS | INTEGERS.keys() | SECONDS | CHOICES.keys() | TEXTS
    assert of_kind(bool) == FLAGS
    assert of_kind(int) == INTEGERS.keys()
    assert of_kind(float) == SECONDS
    literals = {
        name: get_args(kind_of(field.annotation))
        for name, field in FIELDS.items()
        if get_origin(kind_of(field.annotation)) is Literal
    }
    assert literals | CHECKED_TEXTS == CHOICES


@pytest.mark.parametrize("name", INTEGERS)
def test_the_bounds_of_a_number_are_those_of_the_worker(name: str) -> None:
    bounds = [each.ge for each in FIELDS[name].metadata if isinstance(each, Ge)]
    bounds += [each.gt + 1 for each in FIELDS[name].metadata if isinstance(each, Gt)]  # type: ignore[operator]
    assert [INTEGERS[name]] == (bounds or [0])
    most = [each.le for each in FIELDS[name].metadata if isinstance(each, Le)]
    assert most == ([MOST[name]] if name in MOST else [])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--threads 4 --tags fast --tags=big,wide",
        "--no-signed-states --tunnel --proxy http://p:1",
        "--allow-code any --preempt-signal= --drain-grace-s 0.5",
        "--mesh grpc --log-level debug --metrics-port 0",
        "--health-port 65535 --metrics-port 65535",
    ],
)
def test_a_worker_takes_what_a_launch_lets_through(text: str, tmp_path: Path) -> None:
    words = shlex.split(text)
    names = names_of(words)
    assert names == {word.partition("=")[0] for word in words if word.startswith("--")}
    options: dict[str, Any] = {"_cli_parse_args": ["--coordinator", "head:7070", *words]}
    WorkerSettings(**options)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--thread", "4"], "'--thread' is not an option of a worker; did you mean --threads?"),
        (
            ["--data_dir=/x"],
            "'--data_dir=/x' is not an option of a worker; did you mean --data-dir?",
        ),
        (["-t"], "'-t' is not an option of a worker; `stratagem worker --help` lists them"),
        (["--"], "'--' is not an option of a worker; `stratagem worker --help` lists them"),
        (["--tags", "a", "b"], "'b' belongs to no option; `stratagem worker --help` lists them"),
        (["--tags"], "--tags needs a value, as in --tags=VALUE"),
        (["--tags", "--tunnel"], "--tags needs a value, as in --tags=VALUE"),
        (["--tunnel=yes"], "--tunnel is 'yes'; allowed is no value"),
        (["--threads", "0"], "--threads is '0'; allowed is a whole number of at least 1"),
        (["--threads=-1"], "--threads is '-1'; allowed is a whole number of at least 1"),
        (["--metrics-port", "99999"], f"--metrics-port is '99999'; {PORTS}"),
        (["--health-port=65536"], f"--health-port is '65536'; {PORTS}"),
        (["--health-port=http"], f"--health-port is 'http'; {PORTS}"),
        (["--drain-grace-s=soon"], "--drain-grace-s is 'soon'; allowed is a number of seconds"),
        (["--drain-grace-s=inf"], "--drain-grace-s is 'inf'; allowed is a number of seconds"),
        (["--mesh=tcp"], "--mesh is 'tcp'; allowed is one of auto, shm, nccl, gloo, grpc"),
        (["--log-level=x"], "--log-level is 'x'; allowed is one of debug, info, warning, error"),
    ],
)
def test_what_a_worker_would_refuse_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        names_of(words)
    assert str(refused.value) == f"--worker: {problem}"
