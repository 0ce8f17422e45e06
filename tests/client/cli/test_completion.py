"""Shells complete commands and run ids by the scripts of `stratagem completion`: bash and fish are
asked themselves where they are installed."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from stratagem.client.cli.main import assemble
from stratagem.client.sdk.blocking import Client
from stratagem.client.terminal import completion
from stratagem.coordinator.core.facts import KINDS
from tests.client.cli.command_line import invoke
from tests.client.fake_coordinator import JOB
from tests.patience import PATIENCE_S

PATIENT = f"""#!{sys.executable}
from stratagem.client.terminal import completion
from stratagem.program.__main__ import main

completion.PATIENCE_S = {PATIENCE_S}
main()
"""
"""The program, where it does not matter how fast a coordinator answers."""
Environment = dict[str, str]


def script_of(shell: str) -> str:
    return invoke("completion", shell).stdout


def by_bash(line: str, folder: Path, environment: Environment) -> list[str]:
    words = " ".join(f"'{word}'" for word in line.split(" "))
    asked = f"{script_of('bash')}\nCOMP_WORDS=({words}); COMP_CWORD={line.count(' ')}\n"
    asked += "_stratagem_completion stratagem; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, env=environment)
    assert done.stderr == ""
    return done.stdout.split()


def by_fish(line: str, folder: Path, environment: Environment) -> list[str]:
    """What fish offers, which it sorts; behind a tab each has a description."""
    asked = f"{script_of('fish')}\ncomplete -C'{line}'"
    command = ["fish", "--no-config", "-c", asked]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stderr == ""
    return [offered.split("\t")[0] for offered in done.stdout.splitlines()]


SHELLS: dict[str, Callable[[str, Path, Environment], list[str]]] = {
    "bash": by_bash,
    "fish": by_fish,
}


@pytest.mark.parametrize(
    "shell",
    ["bash", pytest.param("fish", marks=pytest.mark.sweep)],
)
def test_a_shell_completes_commands_and_run_ids(
    client: Client, address: str, tmp_path: Path, shell: str
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for run_id in ("mine-1", "mine-2", "other"):
        client.submit(JOB, run_id)
    program = tmp_path / "stratagem"
    program.write_text(PATIENT)
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    usual = {**os.environ, "PATH": path, "TERM": "dumb", "COLUMNS": "100"}

    line = "stratagem status mi"
    offered = SHELLS[shell](line, tmp_path, {**usual, "STRATAGEM_COORDINATOR": address})
    assert {"mine-1", "mine-2"} == {"status", "mine-1", "mine-2", "other"} & set(offered)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("stratagem stat", ["status"]),
        ("stratagem watch mine-1 --kind SegmentF", ["SegmentFinished"]),
        ("stratagem export mine-1 --to te", ["tensorboard:"]),
        ("stratagem stop --coordinator {address} o", ["other"]),
        ("stratagem status mi", []),
    ],
)
def test_what_a_line_could_go_on_with(
    client: Client,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    offered: list[str],
) -> None:
    """As bash asks, in this process; nobody answers at the address of the environment."""
    client.submit(JOB, "other")
    monkeypatch.setattr(completion, "PATIENCE_S", PATIENCE_S)
    words = line.format(address=address)
    for name, value in (
        ("_STRATAGEM_COMPLETE", "complete_bash"),
        ("COMP_WORDS", words),
        ("COMP_CWORD", str(words.count(" "))),
        ("STRATAGEM_COORDINATOR", "127.0.0.1:9"),
    ):
        monkeypatch.setenv(name, value)
    completion.answer_shells()
    with pytest.raises(SystemExit):
        typer.main.get_command(assemble()).main(
            prog_name="stratagem", complete_var="_STRATAGEM_COMPLETE"
        )
    assert capsys.readouterr().out.split() == offered


def test_values_are_offered_that_there_are() -> None:
    assert "_STRATAGEM_COMPLETE=" in script_of("zsh")
    assert set(completion.EVENT_KINDS) <= KINDS.keys()
    assert completion.event_kinds("Run") == [
        *("RunCancelled", "RunCompleted", "RunFailed", "RunReleased", "RunResumed", "RunSubmitted"),
    ]
    assert completion.event_kinds("x") == []
    assert {"csv:", "jsonl:", "tensorboard:"} <= set(completion.sink_forms(""))
    assert completion.sink_forms("cs") == ["csv:"]
    assert completion.sink_forms("csv:a") == []


def test_a_coordinator_that_does_not_answer_in_time_completes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(completion, "PATIENCE_S", 0.01)
    context = typer.Context(typer.main.get_command(assemble()), info_name="stratagem")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        context.params = {"coordinator": f"127.0.0.1:{silent.getsockname()[1]}"}
        assert completion.run_ids(context, "") == []
    assert tuple(capsys.readouterr()) == ("", "")
