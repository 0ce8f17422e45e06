"""Questions that the client asks a process with torch."""

import json
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.sdk import torch_process
from stratagem.client.sdk import torch_process as planning
from stratagem.common.base.errors import StratagemError, UnavailableError, UserCodeError
from stratagem.common.job import load_job
from stratagem.tools.questions import _error_values as told
from stratagem.tools.questions import answer
from tests.client.cli.command_line import invoke
from tests.jobs import job
from tests.repository import ROOT

EXAMPLE = ROOT / "examples" / "digits_local.yaml"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions are answered in this process; others are asked by `stratagem check`."""

    def exchange(request: str, *_: object) -> tuple[dict[str, Any], int, str]:
        try:
            return {"answer": answer(json.loads(request))}, 0, ""
        except StratagemError as error:
            return {"error": told(error)}, 0, ""

    monkeypatch.setattr(torch_process, "_exchange", exchange)


@pytest.mark.usefixtures("here")
def test_the_command_estimates_and_tells_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job().canonical_json())
    ended = invoke("estimate", tmp_path / "job.json", "--format", "json")
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    assert found["total"] == sum(
        found[part]
        for part in (
            *("parameters", "gradients", "optimizer"),
            *("activations", "workspace", "buffers"),
        )
    )
    assert found["rows"] == 16
    override = ["--set", "model.entrypoint=examples.digits:no_such_model"]
    ended = invoke("recommend", EXAMPLE, "--memory", "1GB", *override)
    assert ended.exit_code == 1
    assert "model.entrypoint" in ended.stderr


@pytest.mark.usefixtures("here")
def test_code_that_would_travel_is_what_is_looked_at(tmp_path: Path) -> None:
    """As on a worker: what is left out of it is not there."""
    (tmp_path / "brought.py").write_text("import there\nimport ignored\n")
    (tmp_path / "there.py").write_text("")
    (tmp_path / "ignored.py").write_text("")
    (tmp_path / ".gitignore").write_text("ignored.py")
    spec = job({"entrypoint": "brought:build"}, code=str(tmp_path))
    with pytest.raises(UserCodeError, match="No module named 'ignored'") as caught:
        planning.estimate_memory(spec, import_path=[ROOT])
    assert "brought.py" in caught.value.traceback


def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_process, "find_spec", lambda _: None)
    with pytest.raises(UnavailableError, match="torch is not installed here"):
        planning.estimate_memory(EXAMPLE)


def test_data_parallel_needs_no_look_at_the_model() -> None:
    spec = load_job(EXAMPLE, ["execution.parallelism={DataParallel: 3}"])
    resolved, reason = planning.resolve_parallelism(spec, [])
    assert resolved.document()["strategy"] == {
        "type": "DataParallel",
        "num_replicas": 3,
        "aggregation": {"method": "AllReduce"},
    }
    assert resolved.execution.parallelism == "None"
    assert reason == "DataParallel over 3 workers, as asked for"
