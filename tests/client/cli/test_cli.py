"""The command line: exit codes, exact texts, JSON, and what Ctrl-C means."""

import gc
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
import yaml

from stratagem.client.cli.shared import complain_of_warnings, describe, tag_arguments
from stratagem.client.local import cluster
from stratagem.client.local.cluster import LocalRun
from stratagem.client.sdk.blocking import Client
from stratagem.client.sdk.torch_process import import_folders
from stratagem.client.terminal.tables import amount_text
from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.job import JobSpec, entry_points
from tests.client.cli.command_line import PROGRAM, invoke, json_lines
from tests.client.fake_coordinator import JOB, FakeCoordinator
from tests.patience import PATIENCE_S

_DETACH = "--detach needs a coordinator that stays; leave out --local"

# ---- run ----


def test_run_shows_milestones_every_event_or_only_the_end(address: str, job_file: Path) -> None:
    arguments = ("run", job_file, "--coordinator", address, "--run-id", "mine")
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[:3] == [
        "mine  submitted",
        "mine  COMPLETED  1 epoch done",
        "run       mine (digits)",
    ]
    assert "strategy  Local" in lines
    assert "metrics   train.loss 0.1  test.accuracy 0.97" in lines
    assert invoke(*arguments, "-v").stdout.splitlines()[:4] == [
        "mine  PENDING  submitted",
        "mine  RUNNING  model built",
        "mine  RUNNING  segment 1 committed",
        "mine  COMPLETED  1 epoch done",
    ]
    assert invoke(*arguments, "-q").stdout.splitlines()[0] == "run       mine (digits)"
    assert invoke("attach", "mine", "--coordinator", address).stdout.startswith("run       mine")
    both = invoke(*arguments, "-q", "-v")
    assert both.stderr == "error: --quiet: is the opposite of --verbose; give one of them\n"


@pytest.mark.parametrize("ending", ["completed", "user error"])
def test_run_writes_a_report_however_it_ends(
    fake: FakeCoordinator, address: str, job_file: Path, tmp_path: Path, ending: str
) -> None:
    fake.ending, path = ending, tmp_path / "report.html"
    done = invoke("run", job_file, "--coordinator", address, "--run-id", "mine", "--report", path)
    assert done.exit_code == (0 if ending == "completed" else 1)
    text = path.read_text()
    assert "<h1>mine</h1>" in text
    assert ("ValueError</strong>: bad hidden" in text) == (ending == "user error")
    refused = invoke("run", job_file, "--coordinator", address, "--detach", "--report", path)
    assert refused.exit_code == 1
    assert "--report is written at the end of the run" in refused.stderr


def test_run_as_json_is_one_object_per_line_and_detached_prints_the_id(
    address: str, job_file: Path
) -> None:
    arguments = ("run", job_file, "--coordinator", address, "--run-id", "mine")
    lines = json_lines(invoke(*arguments, "--format", "json").stdout)
    assert [line["type"] for line in lines[:2]] == ["event", "progress"]
    assert (lines[-1]["type"], lines[-1]["phase"]) == ("status", "COMPLETED")
    assert invoke(*arguments, "--detach").stdout == "mine\n"
    detached = invoke(*arguments, "--detach", "--format", "json").stdout
    assert json_lines(detached) == [{"run_id": "mine"}]


def test_run_overrides_fields_and_writes_the_state(
    address: str, job_file: Path, tmp_path: Path, fake: FakeCoordinator
) -> None:
    output = tmp_path / "final.safetensors"
    done = invoke(
        *("run", job_file, "--coordinator", address, "--run-id", "mine"),
        *("--set", "optimizer.lr=0.5", "--set", "model.kwargs.hidden=8", "--output", output),
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == f"state written to {output}"
    assert output.stat().st_size > 8_000_000
    job = fake.runs["mine"].job
    assert (job.optimizer.lr, job.model.kwargs) == (0.5, {"hidden": 8})


def test_a_wrong_job_file_is_one_line_per_violation(job_file: Path) -> None:
    job = {**JOB, "batch_sise": 3, "strategy": {"type": "DataParallel", "num_replicas": 2}}
    job["strategy"]["aggregation"] = {"method": "AllReduse"}
    job_file.write_text(yaml.safe_dump(job))
    done = invoke("run", job_file)
    assert done.exit_code == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines)
    assert (
        "error: strategy.aggregation.method: 'AllReduse' is not one of AllReduce, "
        "ParameterServer, Decentralized; did you mean AllReduce?"
    ) in lines


@pytest.fixture
def complaining() -> Iterator[None]:
    """As in the process of a command."""
    with warnings.catch_warnings():
        complain_of_warnings()
        yield
    logging.getLogger("stratagem.client").handlers.clear()
    structlog.reset_defaults()


@pytest.mark.usefixtures("complaining")
def test_what_is_warned_of_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    job = {**JOB, "strategy": {"type": "Local", "replicas": 2}}
    JobSpec.parse(job)
    structlog.get_logger().info("nobody wants to know")
    logging.getLogger("stratagem.client").warning("it %s", "waits")
    logging.getLogger("stratagem.client").info("nobody wants to know")
    assert tuple(capsys.readouterr()) == (
        "",
        "warning: unknown key is ignored (key strategy.replicas)\nwarning: it waits\n",
    )


@pytest.mark.parametrize("group", [(), ("certs",), ("token",)])
def test_every_command_is_summed_up_in_a_line_that_fits(group: tuple[str, ...]) -> None:
    shown = invoke(*group, "--help").stdout
    assert "Commands:" in shown
    assert "..." not in shown.partition("Commands:")[2]


def test_a_sink_that_fails_changes_no_run_and_an_export_tells(
    address: str, job_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("of somebody else")
    to, options = f"csv:{tmp_path}/rows.csv", ("--coordinator", address)
    done = invoke("run", job_file, *options, "--run-id", "mine", "--log-to", to)
    assert done.exit_code == 0
    said = (
        f"{to}: target: '{tmp_path}/rows.csv' exists and is not of run mine; name another file; "
        "nothing of the run is written there\n"
    )
    assert done.stderr == said
    exported = invoke("export", "mine", *options, "--to", to)
    assert (exported.exit_code, exported.stdout, exported.stderr) == (1, "", said)
    assert (tmp_path / "rows.csv").read_text() == "of somebody else"
    for wrong, reason in (
        ("cvs:rows.csv", "'cvs' is not one of hf, torch-export, onnx, csv, "),
        ("onnx", "'onnx' names no target; write onnx:TARGET"),
    ):
        refused = invoke("export", "mine", *options, "--to", wrong)
        assert refused.exit_code == 1
        assert refused.stderr.startswith(f"error: --to: {reason}")
    refused = invoke("run", job_file, *options, "--log-to", "csv:a", "--detach")
    assert "stratagem export RUN" in refused.stderr
    assert invoke("run", job_file, *options, "--log-to", "cvs:a").exit_code == 1


def test_what_cannot_begin_is_one_line(job_file: Path, tmp_path: Path) -> None:
    missing = tmp_path / "no.yaml"
    for arguments, said in (
        (("run", missing), f"{missing}: No such file or directory"),
        (("run", job_file, "--local", "2", "--detach"), _DETACH),
        (("run", job_file, "--tag", "gpu"), "--tag only concerns local workers; give --local N"),
        (
            ("run", job_file, "--threads", "2"),
            "--threads only concerns local workers; give --local N",
        ),
        (
            ("resume", "other", "--local", "1", "--data-dir", tmp_path),
            f"no local run other in {tmp_path}",
        ),
    ):
        done = invoke(*arguments)
        assert (done.exit_code, done.stderr) == (1, f"error: {said}\n")


def test_nobody_at_the_address_says_what_to_start(job_file: Path) -> None:
    done = invoke("run", job_file, "--coordinator", "127.0.0.1:9")
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        "error: no coordinator answers at 127.0.0.1:9: connection refused",
        "Start one with `stratagem up`, name another with --coordinator HOST:PORT or "
        "STRATAGEM_COORDINATOR, or run without a server: `stratagem run JOB --local 2`. "
        "`stratagem doctor` says more.",
    ]


def test_a_failure_ends_with_the_traceback_of_the_users_code_or_its_reason(
    address: str, job_file: Path, fake: FakeCoordinator
) -> None:
    fake.ending = "user error"
    done = invoke("run", job_file, "--coordinator", address)
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        "Traceback (most recent call last):",
        '  File "m.py", line 3, in f',
        "ValueError: bad hidden",
        "error: ValueError in your code on worker-1, build model",
    ]
    fake.ending = "failed"
    done = invoke("run", job_file, "--coordinator", address, "--run-id", "mine")
    assert done.stderr == "error: run mine failed: worker-0 died three times\n"
    assert done.exit_code == 1


def test_a_mistake_in_the_job_that_a_worker_has_found_is_no_exception_of_the_users_code() -> None:
    error = UserCodeError("InvalidInputError", "loss.name: 'x' is unknown", "", "w0", "building")
    assert list(describe(error)) == ["error: loss.name: 'x' is unknown (on w0, building)"]


# ---- Ctrl-C ----


def test_ctrl_c_detaches_from_a_coordinator(
    address: str, job_file: Path, fake: FakeCoordinator
) -> None:
    fake.ending = "never"
    arguments = ["run", str(job_file), "--coordinator", address, "--run-id", "mine"]
    process = subprocess.Popen(
        [*PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "mine  submitted\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr.read().splitlines() == [
            f"detached; run mine continues at {address}",
            f"see it again with: stratagem attach mine --coordinator {address}",
        ]
    assert fake.runs["mine"].phase == 3  # still running


@pytest.mark.usefixtures("complaining")
def test_a_call_that_ctrl_c_has_kept_from_its_start_is_not_told_of() -> None:
    """Any other warning would be an error here."""

    async def call() -> None: ...

    call()  # type: ignore[unused-coroutine]
    gc.collect()


@pytest.mark.parametrize(
    "imported", ["stratagem.common", pytest.param("yaml.cyaml", marks=pytest.mark.sweep)]
)
def test_ctrl_c_while_the_program_is_imported_ends_it_without_a_traceback(
    address: str, job_file: Path, fake: FakeCoordinator, imported: str
) -> None:
    fake.ending = "never"
    program = [sys.executable, "-X", "importtime", *PROGRAM[1:]]
    process = subprocess.Popen(
        [*program, "run", str(job_file), "--coordinator", address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        while (line := process.stderr.readline()).split("|")[-1].strip() != imported:
            assert line, "it has ended"
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(PATIENCE_S) == 130
    # A signal that comes late, on a busy machine, detaches from the run.
    words = [line for line in rest.splitlines() if not line.startswith("import time:")]
    assert not [line for line in words if "detached" not in line and "attach" not in line]


def test_the_help_says_what_ctrl_c_does() -> None:
    text = " ".join(invoke("run", "--help").stdout.split())
    assert "Ctrl-C then stops the run" in text
    assert "Against a coordinator Ctrl-C only detaches" in text
    assert "Exit code: 0 completed, 1 failed, 130 interrupted." in text
    verbs = invoke("--help").stdout
    for verb in (
        *("up", "coordinator", "worker", "run", "list", "status", "logs", "watch", "attach"),
        *("stop", "resume", "delete", "download", "workers"),
    ):
        assert f" {verb} " in verbs


# ---- local runs ----


def test_only_what_the_job_names_is_allowed() -> None:
    job = {**JOB, "loss": "mine.losses:huber"}
    names = entry_points(JobSpec.parse(job))
    assert names == ("examples.digits:build_model", "examples.digits:load", "mine.losses:huber")


def test_a_local_run_is_remembered_for_resume(tmp_path: Path) -> None:
    known = LocalRun(("a:b",), ("/x",), ("worker-0=gpu",), threads=3)
    known.save(tmp_path, "mine")
    assert LocalRun.load(tmp_path, "mine") == known


def test_a_run_of_old_goes_on_with_the_threads_of_the_cores_that_it_was_bound_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Version 0.2.0 did not look at what the control groups of a container pay for."""
    monkeypatch.setattr(cluster, "bound_cores", lambda: 8)
    old = LocalRun(("a:b",), ())
    assert [old.threads_of(number).number for number in (1, 3, 16)] == [8, 2, 1]


def test_tags_are_of_one_local_worker_or_of_all() -> None:
    found = tag_arguments(["worker-1=gpu", "large", "worker-1=near"], 2)
    assert found == {"worker-0": ("--tags", "large"), "worker-1": ("--tags", "gpu,large,near")}
    assert tag_arguments([], 2) == {}
    for tag, reason in (("worker-2=x", "'worker-2' is not one of"), ("worker-1=", "has no tag")):
        with pytest.raises(InvalidInputError, match=reason):
            tag_arguments([tag], 2)


def test_modules_are_found_beside_the_job_and_here(tmp_path: Path) -> None:
    assert import_folders(tmp_path / "job.yaml") == (Path.cwd(), tmp_path)


# ---- servers ----


def test_coordinator_and_worker_become_their_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _path, command: called.append(command))
    invoke("coordinator", "--help")
    invoke("worker", "--name", "w", "--help")
    assert called == [
        [sys.executable, "-m", "stratagem.coordinator", "--help"],
        [sys.executable, "-m", "stratagem.worker", "--name", "w", "--help"],
    ]


# ---- the status ----


def test_the_status_of_a_population_counts_generations(
    client: Client, fake: FakeCoordinator
) -> None:
    status = client.submit(JOB).status()
    counted = replace(
        status,
        strategy="PopulationBased/Truncation",
        step=5,
        num_steps=5,
        segment=5,
        num_segments=5,
    )
    assert amount_text(counted) == "generation 5/5"
