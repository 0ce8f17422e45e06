"""Settings that cannot work together are refused at the start, with the names of both."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from stratagem.common.process.process import told
from stratagem.coordinator.process import main as coordinator_main
from stratagem.coordinator.process import restore
from stratagem.worker.process import main as worker_main
from stratagem.worker.process.settings import from_command_line
from tests.settings import coordinator_settings


def refusal(**settings: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        coordinator_settings(**settings)
    return told("stratagem coordinator", caught.value)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"worker_ttl_s": 4.7}, ("--worker-ttl-s", "--heartbeat-interval-s", "2.4 times")),
        ({"heartbeat_interval_s": 5.0}, ("--worker-ttl-s is 10", "which is 5")),
        ({"max_calls": 1999}, ("--max-calls", "--max-watchers")),
        ({"max_calls": 100, "max_watchers": 50, "max_uploads": 51}, ("--max-uploads",)),
        ({"max_spool_bytes": 2**30}, ("--max-spool-bytes", "--max-state-bytes")),
        ({"max_job_bytes": 2**21}, ("--max-job-bytes", "4194304")),
    ],
)
def test_contradictions_name_both_settings(
    settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    text = refusal(**settings)
    assert text.startswith("stratagem coordinator: --")
    assert "\n" not in text
    assert all(name in text for name in names), text


def test_what_just_fits_is_taken() -> None:
    coordinator_settings(worker_ttl_s=4.8, max_calls=2000)


def test_wrong_values_name_their_setting() -> None:
    text = refusal(stream_idle_timeout_s=0.0, max_uploads=-1)
    first, second = text.splitlines()
    assert first.startswith("stratagem coordinator: --max-uploads: ")
    assert second.startswith("stratagem coordinator: --stream-idle-timeout-s: ")


def test_a_worker_refuses_them_too() -> None:
    with pytest.raises(ValidationError, match="--max-calls is 10 and must be at least 2 times"):
        from_command_line(["--coordinator", "127.0.0.1:1", "--max-calls", "10"])


def end(words: list[str]) -> int | str | None:
    """What a process with this command line ends with."""
    name, *arguments = words
    mains: dict[str, Callable[[], object]] = {
        "coordinator": coordinator_main.main,
        "restore": restore.main,
        "worker": lambda: sys.exit(worker_main.main(arguments)),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        patch.setattr(worker_main, "keep_forks_away", lambda: None)  # this process goes on
        with pytest.raises(SystemExit) as ended:
            mains[name]()
    return ended.value.code


WORKER = ["worker", "--coordinator", "127.0.0.1:1"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["coordinator", "--worker-ttl-s", "1"], "is 1 and must be at least 2.4 times --heartbeat"),
        (["restore", "backup", "--max-uploads", "-1"], "stratagem restore: --max-uploads: "),
        ([*WORKER, "--for-run", "bad id!"], "--for-run: 'bad id!' is not 1 to 64 of a-z, 0-9, '-'"),
        ([*WORKER, "--log-level", "x"], "--log-level: 'x'"),
        ([*WORKER, "--stall-report-s", "inf"], "Input should be less than or equal to 31536000"),
        ([*WORKER, "--no-such"], "unrecognized arguments"),
    ],
    ids=lambda each: each[-1] if isinstance(each, list) else "",
)
def test_wrong_settings_end_a_process_with_2_and_the_reason(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end(words) == 2
    assert problem in capsys.readouterr().err
