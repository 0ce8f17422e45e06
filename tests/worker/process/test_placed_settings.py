"""A worker's settings where a launcher has started it."""

import socket

import pytest
from pydantic import ValidationError

from stratagem.common.process.cpu_threads import VARIABLES, available_cores
from stratagem.worker.process import settings as placed_settings
from stratagem.worker.process.settings import from_command_line

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "f3a1",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
}


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(f"{placed_settings.__name__}.available_cores", lambda: 6)


def test_what_nobody_says_follows_from_the_place() -> None:
    """And without a launcher from nothing."""
    settings = from_command_line(["--rendezvous", "env"])
    assert settings.worker_id == "torchrun-f3a1-0-1"
    assert settings.coordinator == "127.0.0.1:7070"
    assert settings.listen == "127.0.0.1:0"
    assert (settings.threads, settings.max_readers, settings.ephemeral) == (3, 3, True)
    assert settings.device == "cpu"
    assert from_command_line(["--rendezvous", "env", "--tunnel"]).tunnel
    alone = from_command_line(["--coordinator", "127.0.0.1:1"])
    assert (alone.worker_id, alone.ephemeral) == (socket.gethostname(), False)


def test_what_is_said_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_WORKER_THREADS", "4")
    given = ["--coordinator=10.0.0.1:1", "--name=w", "--listen=0.0.0.0:9", "--no-ephemeral"]
    settings = from_command_line(["--rendezvous", "torchrun", *given])
    assert (settings.worker_id, settings.coordinator) == ("w", "10.0.0.1:1")
    assert (settings.listen, settings.threads, settings.ephemeral) == ("0.0.0.0:9", 4, False)


@pytest.mark.parametrize("place", [["--rendezvous", "env"], []], ids=["launched", "alone"])
def test_threads_are_of_the_environment(place: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores are for readers all the same; and a number that is given counts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = ["--coordinator", "127.0.0.1:1", *place]
    settings = from_command_line(given)
    assert (settings.threads, settings.threads_text) == (1, "1 thread (OMP_NUM_THREADS)")
    assert settings.max_readers == (3 if place else available_cores())
    assert from_command_line([*given, "--threads", "4"]).threads_text == "4 threads"


@pytest.mark.parametrize(
    ("arguments", "variables", "problem"),
    [
        (["--rendezvous", "env"], {"RANK": "2"}, "RANK is '2', which is not below WORLD_SIZE"),
        (["--rendezvous", "env"], {"MASTER_ADDR": ""}, "neither STRATAGEM_COORDINATOR nor MASTER_"),
        (["--rendezvous", "env"], {"MASTER_ADDR": "no.such.invalid"}, "is not known from here"),
        (["--rendezvous", "lsf"], {}, "Input should be 'torchrun', 'slurm', 'kubernetes', 'mpi'"),
        (["--rendezvous", "env", "--for-run", "A B"], {}, "for_run"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str],
    variables: dict[str, str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError, match=problem):
        from_command_line(arguments)
