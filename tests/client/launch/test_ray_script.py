"""What `stratagem launch ray` hands to `ray job submit`."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.launch.scripts import ray_script
from stratagem.client.launch.workers import WorkerLaunch, launch_of
from stratagem.common.base.ids import RunId
from tests.client.cli.command_line import invoke
from tests.jobs import document, job


def launched(*options: str) -> WorkerLaunch:
    return launch_of(job(), RunId("r-1"), "head:7070", 3, "/py", ('/a "b"',), options)


def constants(script: str) -> dict[str, Any]:
    """What the program says of itself: its simple assignments of literals."""
    found: dict[str, Any] = {}
    for each in ast.parse(script).body:
        if isinstance(each, ast.Assign) and len(each.targets) == 1:
            found[ast.unparse(each.targets[0])] = ast.literal_eval(each.value)
    return found


def test_the_program_says_what_was_asked_for() -> None:
    said = constants(ray_script(launched(), 4, 1, "head"))
    assert said["NUM_WORKERS"] == 3
    assert said["(CPUS, GPUS)"] == (4, 1)
    command = said["COMMAND"]
    assert command[:3] == ["/py", "-m", "stratagem.worker"]
    assert command[command.index("--import-path") + 1] == '/a "b"'
    assert command[-6:] == ["--rendezvous", "env", "--threads", "4", "--max-readers", "4"]


def test_threads_that_are_said_stay() -> None:
    command = constants(ray_script(launched("--threads=2", "--max-readers", "1"), 4, 0, "head"))
    assert command["COMMAND"][-5:-2] == ["--threads=2", "--max-readers", "1"]


@pytest.mark.parametrize("option", ["head", "-", "--address=a\n--x"])
def test_what_is_no_option_is_refused_before_the_run_is_submitted(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.json").write_text(json.dumps(document()))
    command = ["launch", "ray", "job.json", "-n", "2", "--coordinator", "nowhere:1"]
    done = invoke(*command, "--run-id", "r", "--", option)
    assert done.exit_code == 1
    assert "is not an option of ray job submit" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json"]
