"""The gate of a site: what it writes of each plan, and a file that changes while it runs."""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.base.errors import (
    InvalidInputError,
    RefusedBySiteError,
    SiteClosedError,
    UserCodeError,
)
from stratagem.v1 import types_pb2
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.site.gate import SiteGate
from tests.worker.site.jobs import ANY, NIGHTS, offered, site_of

pytestmark = pytest.mark.core

NIGHT = datetime(2026, 11, 23, 20, 0, tzinfo=UTC)


def gate_of(folder: Path, clock: Callable[[], datetime] = lambda: NIGHT) -> SiteGate:
    return SiteGate(folder / "site.toml", "w0", clock=clock)


def request_of(job: Any, run: str = "run-1", submitter: str = "client/maria") -> pb.ExecuteRequest:
    return pb.ExecuteRequest(
        session=types_pb2.SessionRef(run_id=run, party="client0"),
        segment=3,
        job_json=job.canonical_json(),
        submitted_by=submitter,
        client_round=pb.ClientRoundPlan(num_clients=5),
    )


def test_data_that_are_not_there_are_named_without_an_import(tmp_path: Path) -> None:
    (tmp_path / "ward_loaders.py").write_text("raise ImportError('it was imported')")
    (tmp_path / "ct.safetensors").write_bytes(b"")
    site_of(tmp_path, ANY, more='[data.lab]\nentrypoint = "ward_loaders:lab"\n')
    file = tmp_path / "site.toml"
    gate = SiteGate(file, "w0", import_paths=(str(tmp_path),))
    absent = f"data.xray.file: {tmp_path / 'xray.safetensors'} is no file"
    assert gate.absent_data() == [absent]
    text = "no module 'ward_loaders' is installed, or in --import-path"
    loader = f"data.lab.entrypoint: 'ward_loaders:lab' cannot be found: {text}"
    assert SiteGate(file, "w0").absent_data() == [absent, loader]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


def rewritten(folder: Path, *rules: str, more: str = "") -> None:
    """Write the file anew, in such a way that it has another stamp."""
    site_of(folder, *rules, more=more)
    os.utime(folder / "site.toml", ns=(1, hash((rules, more)) & 0xFFFF_FFFF))


def test_offers_and_refusals_are_written_down(tmp_path: Path) -> None:
    """And a changed file counts from the next plan."""
    site_of(tmp_path, f"{ANY}\nmax_rounds = 10")
    gate, job = gate_of(tmp_path), offered()
    gate.admit(request_of(job), job)
    longer = offered({"rounds": 11})
    with pytest.raises(RefusedBySiteError, match=r"max_rounds: strategy.rounds 11"):
        gate.admit(request_of(longer), longer)
    offer, refusal = lines(tmp_path)
    assert (offer["kind"], offer["rule"], offer["round"]) == ("offer", 1, 3)
    assert offer["at"] == "2026-11-23T20:00:00.000+00:00"
    assert (offer["submitter"], offer["worker"], offer["run"]) == ("client/maria", "w0", "run-1")
    assert offer["file"] == gate.site.digest
    assert refusal["kind"] == "refusal"
    assert refusal["reason"].startswith("site st-anna refuses: its rule, max_rounds")
    assert offer["job"] != refusal["job"]
    rewritten(tmp_path, f"{ANY}\nmax_rounds = 9")
    with pytest.raises(RefusedBySiteError, match="max_rounds"):
        gate.admit(request_of(job), job)
    rewritten(tmp_path, f"{ANY}\nmax_rounds = 10")
    assert gate.admit(request_of(job), job).record["rule"] == 1


def test_a_file_that_becomes_wrong_refuses_all_until_it_is_right(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text("site = 3")
    with pytest.raises(InvalidInputError, match="site: 3 is not text"):
        gate_of(tmp_path)  # which refuses a file that is wrong at the start
    site_of(tmp_path, ANY)
    gate, job = gate_of(tmp_path), offered()
    before = (tmp_path / "site.toml").read_text()
    (tmp_path / "site.toml").write_text(before + 'code = "secret-word"\n')
    wrong = r"was changed and is wrong at accept\[0\].code"
    for _ in range(2):
        with pytest.raises(RefusedBySiteError, match=wrong):
            gate.admit(request_of(job), job)
    assert "secret-word" not in (tmp_path / "audit.jsonl").read_text()
    assert [line["kind"] for line in lines(tmp_path)] == ["refusal", "refusal"]
    (tmp_path / "site.toml").unlink()
    with pytest.raises(RefusedBySiteError, match="was changed and is wrong"):
        gate.admit(request_of(job), job)
    rewritten(tmp_path, ANY)
    gate.admit(request_of(job), job)


def test_a_window_counts_by_the_sites_clock(tmp_path: Path) -> None:
    site_of(tmp_path, NIGHTS)
    now = [NIGHT]
    gate, job = gate_of(tmp_path, lambda: now[0]), offered()
    admission = gate.admit(request_of(job), job)
    assert admission.open_s == 9 * 3600
    assert str(admission.closed) == "site st-anna is closed: opens Tue 19:00 Europe/Vienna"
    now[0] = datetime(2026, 11, 24, 5, 0, tzinfo=UTC)
    assert admission.closed.opens_in_s == 13 * 3600
    with pytest.raises(SiteClosedError, match="opens Tue 19:00 Europe/Vienna") as caught:
        gate.admit(request_of(job), job)
    assert caught.value.opens_in_s == 13 * 3600


def test_nothing_is_let_in_while_the_audit_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site_of(tmp_path, ANY)
    gate, job = gate_of(tmp_path), offered()
    admission = gate.admit(request_of(job), job)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RefusedBySiteError, match="its audit cannot be written"):
        gate.admit(request_of(job), job)
    done = pb.ExecuteResult(client_round=pb.ClientRoundResult(loss=1.0))
    with pytest.raises(RefusedBySiteError, match="its audit cannot be written"):
        admission.disclosed(done)


# ---- what leaves ----


def test_a_result_leaves_with_what_the_rule_names(tmp_path: Path) -> None:
    site_of(tmp_path, f'{ANY}\nmetrics = ["accuracy"]')
    job = offered()
    admission = gate_of(tmp_path).admit(request_of(job), job)
    done = pb.ClientRoundResult(num_samples=7, loss=0.5, loss_before=0.0)
    done.metrics["max_grad_norm"] = 2.0
    expected = pb.ClientRoundResult.FromString(done.SerializeToString())
    done.metrics["Smith, Anna"] = 3.0
    done.num_history_parts, done.history_digest = 3, "ab"
    assert admission.disclosed(pb.ExecuteResult(client_round=done)).client_round == expected
    evaluated = pb.EvaluateResult(wants_evaluation=True)
    evaluated.own_metrics.MergeFrom(pb.OwnMetrics(are_measured=True, metrics={"test.m:auc": 0.5}))
    for batch in (2, 0, 1):
        sums = {"loss": 0.1 * batch, "accuracy": 1.0, "x": 9}
        evaluated.parts.add(split="test", batch=batch, weight=2.0, sums=sums)
    (part,) = admission.disclosed(pb.ExecuteResult(evaluate=evaluated)).evaluate.parts
    assert (part.split, part.weight) == ("test", 6.0)
    assert part.sums == {"loss": 0.0 + 0.1 + 0.2, "accuracy": 3.0}
    assert [line["kind"] for line in lines(tmp_path)[1:]] == ["answer", "answer"]
    with pytest.raises(RefusedBySiteError, match="tells nothing of a plan show"):
        admission.disclosed(pb.ExecuteResult(show=pb.Shown(stop_reason="Smith, Anna")))


def test_a_site_that_reports_nothing_withholds_the_loss(tmp_path: Path) -> None:
    site_of(tmp_path, f'{ANY}\nreport = "none"')
    job = offered()
    admission = gate_of(tmp_path).admit(request_of(job), job)
    done = pb.ClientRoundResult(num_samples=7, loss=0.5, loss_before=0.7, num_applied_steps=3)
    done.metrics["max_grad_norm"] = 2.0
    expected = pb.ClientRoundResult(num_samples=7, is_loss_withheld=True, num_applied_steps=3)
    assert admission.disclosed(pb.ExecuteResult(client_round=done)).client_round == expected


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        return caught


class OwnError(Exception):
    """What a job's code might raise."""


SMITH = type("SmithAnna", (ValueError,), {})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("Smith, Anna"), "KeyError"),
        (OwnError("Smith, Anna"), f"{__name__}.OwnError"),
        (SMITH("Smith, Anna"), "ValueError"),  # a type may be made with any name
        (ExceptionGroup("Smith, Anna", [KeyError("Smith, Anna")]), "KeyError"),
        (InvalidInputError.at("Smith", "Anna"), "stratagem.common.base.errors.InvalidInputError"),
    ],
)
def test_an_error_leaves_with_type_and_place(
    tmp_path: Path, error: BaseException, kind: str
) -> None:
    site_of(tmp_path, ANY)
    job = offered()
    admission = gate_of(tmp_path).admit(request_of(job), job)
    raised = _raised(error)
    wrapped = UserCodeError(kind, str(error), "a traceback with Smith, Anna")
    wrapped.__cause__ = raised
    told = admission.error(wrapped, "training", wrapped)
    line = raised.__traceback__.tb_lineno if raised.__traceback__ else 0
    place = "" if isinstance(error, ExceptionGroup) else " at tests/worker/site/test_site_gate.py"
    assert told.type == kind
    assert told.message.startswith(f"{kind}{place and f'{place}, line {line}'}; site st-anna keeps")
    assert "Anna" not in told.message.removeprefix(kind)
    assert told.traceback == ""


def test_a_site_may_share_messages(tmp_path: Path) -> None:
    site_of(tmp_path, ANY, head='share_errors = "message"\n')
    job = offered()
    admission = gate_of(tmp_path).admit(request_of(job), job)
    raised = _raised(KeyError("label"))
    told = admission.error(raised, "training", UserCodeError("KeyError", "'label'", "a trace"))
    assert (told.message[-9:], told.traceback) == (": 'label'", "")
