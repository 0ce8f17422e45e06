"""What the command line answers about runs and workers: texts, tables, JSON."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.text import Text

from stratagem.client.cli.shared import PlainConsole, make_console
from stratagem.client.course.views import Event, Phase, run_status
from stratagem.client.sdk.blocking import Client
from stratagem.client.terminal.tables import print_runs, print_status
from stratagem.common.job import JobSpec
from stratagem.v1 import coordinator_pb2 as pb
from tests.client.cli.command_line import PROGRAM, invoke, json_lines
from tests.client.fake_coordinator import JOB, FakeCoordinator


def test_list_status_workers(address: str, job_file: Path) -> None:
    assert invoke("list", "--coordinator", address).stdout == "no runs\n"
    invoke("run", job_file, "--coordinator", address, "--run-id", "mine", "--detach")
    listed = invoke("list", "--coordinator", address).stdout
    assert "mine" in listed
    assert "COMPLETED" in listed
    shown = invoke("status", "mine", "--coordinator", address).stdout
    for text in ("engine    solo", "reason    1 epoch done", "/f", "best", "step 20/20"):
        assert text in shown
    workers = invoke("workers", "--coordinator", address).stdout
    assert "silent for 40 s" in workers
    assert "no heartbeat for 10 s" in workers
    assert "nobody answers at [h]:1 as worker 'worker-2' (asked 3 times)" in workers
    options = ("--coordinator", address, "--format", "json")
    told = json.loads(invoke("workers", *options).stdout)
    assert [each["is_alive"] for each in told] == [True, False, False]
    assert [each.get("is_refused", False) for each in told] == [False, False, True]
    assert json.loads(invoke("list", *options).stdout)[0]["run_id"] == "mine"
    assert json.loads(invoke("status", "mine", *options).stdout)["commits"][1]["path"] == "/f"
    assert json_lines(invoke("logs", "mine", *options).stdout)[1]["text"] == "hello"
    named = invoke("list", env={"STRATAGEM_COORDINATOR": address})
    assert (named.exit_code, "mine" in named.stdout) == (0, True)


def test_a_quarantine_is_shown_with_its_reason_and_lifted(
    address: str, fake: FakeCoordinator
) -> None:
    options = ("--coordinator", address)
    fake.quarantine = "segment 3 was wrong"
    shown = invoke("workers", *options).stdout
    assert "quarantined, alive" in shown
    assert "segment 3 was wrong" in shown
    told = json.loads(invoke("workers", *options, "--format", "json").stdout)
    assert [each.get("quarantine") for each in told] == ["segment 3 was wrong", "", None]
    released = invoke("workers", *options, "--release", "worker-0")
    assert (released.exit_code, released.stdout) == (0, "")
    assert released.stderr == "worker worker-0 is released, and gets work again\n"
    assert "quarantined" not in invoke("workers", *options).stdout
    again = invoke("workers", *options, "--release", "worker-0")
    assert (again.exit_code, "worker 'worker-0' is not quarantined" in again.stderr) == (1, True)


def test_a_list_is_a_line_per_run_and_can_be_filtered(
    address: str, job_file: Path, fake: FakeCoordinator
) -> None:
    options = ("--coordinator", address)
    for run_id in ("one", "two", "three"):
        invoke("run", job_file, *options, "--run-id", run_id, "--detach")
    fake.runs["two"].say("RunFailed", "a reason\nof two lines", pb.RUN_PHASE_FAILED)

    def listed(*filters: str) -> list[str]:
        shown = invoke("list", *options, *filters)
        assert shown.exit_code == 0, shown.output
        return [line.split()[0] for line in shown.stdout.splitlines()]

    assert listed() == ["run", "three", "two", "one"]
    assert listed("--limit", "2") == ["run", "three", "two"]
    assert listed("--phase", "failed") == ["run", "two"]
    assert listed("--phase", "failed", "--phase", "completed", "--limit", "0") == listed()
    assert listed("--name", "t*") == ["run", "three", "two"]
    assert listed("--name", "digits") == listed()
    assert listed("--strategy", "local") == listed()
    assert listed("--strategy", "Fed") == ["no"]
    assert "a reason\\x0aof two lines" in invoke("list", *options).stdout
    failed = next(line for line in invoke("list", *options).stdout.splitlines() if "two" in line)
    assert "committed to step 20 of 20" in failed
    assert "step 20/20" in invoke("list", *options, "--phase", "completed").stdout
    assert invoke("list", *options, "--phase", "over").exit_code == 2


def test_a_list_on_a_terminal_is_cut(client: Client) -> None:
    status = client.submit(JOB, "mine").status()
    out = io.StringIO()
    print_runs(PlainConsole(file=out, force_terminal=True, width=40), [status])
    assert all(cell_len(Text.from_ansi(line).plain) <= 40 for line in out.getvalue().splitlines())
    assert len(out.getvalue().splitlines()) == 2


@pytest.mark.parametrize(
    ("evaluation", "told"),
    [
        ({"split": "test", "metrics": ["accuracy"], "best": "loss"}, "test.loss 0.25"),
        ({"split": "test", "metrics": ["accuracy"]}, "test.accuracy 0.75"),
        ({"split": "test"}, "test.loss 0.25"),
        (None, ""),
    ],
)
def test_a_list_has_a_metric_of_the_evaluation(
    client: Client, evaluation: dict[str, object] | None, told: str
) -> None:
    metrics = {"test.accuracy": 0.75, "test.loss": 0.25, "train.loss": 0.5}
    status = client.submit(JOB, "mine").status()
    status = replace(status, job={**status.job, "evaluation": evaluation}, metrics=metrics)
    out = io.StringIO()
    print_runs(PlainConsole(file=out, width=400), [status])
    assert f"train.loss 0.5  {told}".strip() in out.getvalue()
    assert out.getvalue().count("test.") == bool(told)


def test_the_first_sign_of_a_run_comes_before_anything_is_imported(
    address: str, job_file: Path
) -> None:
    """And neither torch nor a server ever is: the client needs none of them."""
    ours, theirs = pty.openpty()
    program = [sys.executable, "-X", "importtime", *PROGRAM[1:], "run", str(job_file)]
    process = subprocess.Popen(
        [*program, "--coordinator", address, "--run-id", "mine"], stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    with process, suppress(OSError), open(ours, "rb", buffering=0) as terminal:
        while part := terminal.read(4096):  # an OSError, or nothing, once it has ended
            shown += part
    assert process.returncode == 0
    before, _, after = shown.decode().partition("loading stratagem")
    assert "grpc" not in before
    assert "grpc" in after
    assert "mine  Local" in after
    assert "COMPLETED  1 epoch done" in after
    imported = set(re.findall(r"\| +([\w.]+)\r?$", shown.decode(), re.MULTILINE))
    assert "stratagem.client" in imported
    assert not imported & {"torch", "sqlalchemy", "stratagem.coordinator", "stratagem.worker"}


def test_logs_stop_resume_download(address: str, job_file: Path, fake: FakeCoordinator) -> None:
    fake.ending = "never"
    options = ("--coordinator", address)
    invoke("run", job_file, *options, "--run-id", "mine", "--detach")
    lines = invoke("logs", "mine", *options, "--worker", "worker-0", "-f").stdout.splitlines()
    assert [line.split()[1:] for line in lines] == [["worker-0", "info", "hello"]] * 2
    stopped = invoke("stop", "mine", *options)
    assert stopped.exit_code == 0
    assert "stratagem resume mine" in stopped.stderr
    resumed = invoke("resume", "mine", *options)
    assert resumed.exit_code == 0
    assert resumed.stdout.startswith("mine  resumed\n")
    nowhere = job_file.with_name("none") / "best.safetensors"
    refused = invoke("download", "mine", *options, "--output", nowhere)
    assert (refused.exit_code, refused.stderr) == (
        1,
        f"error: {nowhere}: No such file or directory\n",
    )
    output = job_file.with_name("best.safetensors")
    done = invoke("download", "mine", *options, "--which", "best", "--output", output)
    assert (done.stdout, output.exists()) == (f"{output}\n", True)
    folder = job_file.with_name("model")
    sharded = ("download", "mine", *options, "--shard-size", "5GB", "-o", folder)
    done = invoke(*sharded, "--format", "json")
    assert done.exit_code == 0, done.output
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert json.loads(done.stdout) == {"path": str(folder), "size_bytes": size}
    refused = invoke(*sharded, "--profile", job_file.with_name("trace.json"))
    assert refused.stderr == "error: --shard-size: a trace is one file; not with --profile\n"


def test_a_run_that_has_ended_is_not_stopped_and_is_pinned_unpinned_and_deleted(
    address: str, job_file: Path, fake: FakeCoordinator
) -> None:
    options = ("--coordinator", address)
    assert invoke("run", str(job_file), "--run-id", "mine", *options).exit_code == 0
    for command, said in (
        ("stop", "has ended already: COMPLETED"),
        ("pin", "is pinned"),
        ("unpin", "is no longer pinned"),
        ("delete", "is deleted"),
    ):
        done = invoke(command, "mine", *options)
        assert (done.exit_code, done.stderr) == (0, f"run mine {said}\n")
    assert fake.pins == [("mine", True), ("mine", False)]
    assert "mine" not in fake.runs


def test_watch_prints_events_from_an_index(address: str, job_file: Path) -> None:
    options = ("--coordinator", address)
    invoke("run", job_file, *options, "--run-id", "mine", "--detach")
    done = invoke("watch", "mine", *options, "--from-index", "2")
    assert done.stdout.splitlines() == [
        "    2  RUNNING     segment 1 committed",
        "    3  COMPLETED   1 epoch done",
    ]
    done = invoke("watch", "mine", *options, "--kind", "RunSubmitted", "--kind", "ModelBuilt")
    assert done.stdout.splitlines() == [
        "    0  PENDING     submitted",
        "    1  RUNNING     model built",
    ]


def test_watch_leaves_out_how_a_run_is_verified_and_status_says_the_result(
    address: str, fake: FakeCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    job = JobSpec.parse({**JOB, "verification": {"sample": 1.0}})
    again = {"party": "verifier", "segment": 1}
    told = [("SegmentCommitted", again), ("SegmentVerified", {"segment": 1, "workers": ["w1"]})]
    events = [Event(0, 0.0, kind, kind, fact, Phase.RUNNING) for kind, fact in told]
    fake.tell("mine", job, events)
    fake.runs["mine"].say("RunCompleted", "done", pb.RUN_PHASE_COMPLETED)
    options = ("mine", "--coordinator", address)
    lines = invoke("watch", *options).stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["SegmentVerified", "done"]
    asked = invoke("watch", *options, "--kind", "SegmentCommitted").stdout
    assert asked.split()[-1] == "SegmentCommitted"
    found = "12 of 13 chosen segments verified"
    info = fake.runs["mine"].info()
    info.verification = found
    print_status(make_console(), run_status(info))
    assert f"checked   {found}" in capsys.readouterr().out.splitlines()


def test_an_unknown_run_is_one_line(address: str) -> None:
    for verb in [
        "status",
        "attach",
        "watch",
        "logs",
        "stop",
        "resume",
        "delete",
        "pin",
        "download",
    ]:
        done = invoke(verb, "nope", "--coordinator", address)
        assert (done.exit_code, done.stderr) == (1, "error: no run 'nope'\n")


def test_a_filter_that_no_run_passes_says_what_there_is(address: str, job_file: Path) -> None:
    options = ("--coordinator", address)
    invoke("run", job_file, *options, "--run-id", "mine", "--detach")
    done = invoke("list", *options, "--strategy", "Nope")
    assert (done.exit_code, done.stdout) == (0, "no runs\n")
    assert done.stderr == "none of 1 run matches; phases: COMPLETED; strategies: Local\n"
    assert json.loads(invoke("list", *options, "--name", "x", "--format", "json").stdout) == []
    done = invoke("logs", "mine", *options, "--worker", "nope")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "no line of worker 'nope'; there are lines of worker-0, worker-1\n"


def test_where_the_output_is_no_terminal_no_path_is_folded_and_no_line_is_blank(
    address: str, job_file: Path, fake: FakeCoordinator
) -> None:
    fake.folder = "/data" + "/a-folder-with-a-long-name" * 20
    invoke("run", job_file, "--coordinator", address, "--run-id", "mine", "--detach")
    shown = invoke("status", "mine", "--coordinator", address).stdout
    assert f"{fake.folder}/f" in shown.split()
    lines = shown.splitlines()
    assert [line for line in lines if line != line.rstrip() or not line] == []
    assert any(line.startswith(" segment   step") for line in lines)


def test_states_are_listed_with_short_paths_and_say_who_has_measured_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    digests = ["a" * 64, "b" * 64]
    commits = [
        pb.CommitInfo(segment=0, step=60, digest=digests[0], path=str(tmp_path / "blobs" / "a")),
        pb.CommitInfo(segment=1, step=90, digest=digests[1], path="/elsewhere/b", is_final=True),
    ]
    commits[1].metrics.update({"test.loss": 0.5, "train.grad_norm": 7.0})
    resumed = {**JOB, "initial": {"digest": digests[0], "resume": True}}
    run = pb.RunInfo(
        run_id="mine", phase=pb.RUN_PHASE_COMPLETED, job_json=json.dumps(resumed), commits=commits
    )
    print_status(make_console(), run_status(run))
    begun, final = capsys.readouterr().out.splitlines()[-2:]
    assert " ".join(begun.split()) == "0 60 measured by the run that it resumed blobs/a"
    assert final.split() == ["1", "90", "final", "test.loss", "0.5", "/elsewhere/b"]


@pytest.mark.parametrize(
    ("phase", "is_best", "says_so"),
    [
        (pb.RUN_PHASE_COMPLETED, False, True),
        (pb.RUN_PHASE_COMPLETED, True, False),
        (pb.RUN_PHASE_RUNNING, False, False),
    ],
)
def test_a_completed_run_without_a_best_state_says_so(
    capsys: pytest.CaptureFixture[str], phase: pb.RunPhase.ValueType, is_best: bool, says_so: bool
) -> None:
    evaluation = {"split": "test", "metrics": ["task:f1"], "best": "task:f1", "mode": "max"}
    commit = pb.CommitInfo(segment=1, step=90, digest="b" * 64, is_final=True, is_best=is_best)
    for job, is_wanted in (({**JOB, "evaluation": evaluation}, True), (JOB, False)):
        run = pb.RunInfo(run_id="m", phase=phase, job_json=json.dumps(job), commits=[commit])
        print_status(make_console(), run_status(run))
        out = " ".join(capsys.readouterr().out.split())
        said = "best no state: test.task:f1 has no value for any (`stratagem watch` shows why)"
        assert (said in out) == (is_wanted and says_so)


def test_a_path_is_in_one_piece_on_a_terminal() -> None:
    path = f"/data/blobs/{'ab' * 60}.safetensors"
    commit = pb.CommitInfo(segment=12, step=90, digest="b" * 64, path=path, is_final=True)
    commit.metrics.update({"test.loss": 0.5, "train.loss_std": 7.0})
    run = pb.RunInfo(
        run_id="mine",
        phase=pb.RUN_PHASE_FAILED,
        job_json=json.dumps(JOB),
        commits=[commit],
        reason="word " * 30,
    )
    out = io.StringIO()
    terminal = PlainConsole(file=out, force_terminal=True, width=60, color_system=None)
    print_status(terminal, run_status(run))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert f"state 12  {path}" in lines
    assert [line for line in lines if line.startswith("          word word")]
    assert [line.split() for line in lines if "test.loss" in line] == [
        ["12", "90", "final", "test.loss", "0.5"]
    ]
