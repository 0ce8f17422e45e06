"""`stratagem check`: jobs without a fault, and each kind of fault."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from safetensors.torch import save_file

from stratagem.client.cli import jobs
from stratagem.client.course.views import Worker
from stratagem.client.sdk import torch_process
from stratagem.client.sdk.torch_process import check_job as check_file
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Digest
from stratagem.common.job import InitialSpec, JobSpec
from stratagem.common.observe.findings import Finding, Level
from stratagem.tools.check.check import check_job
from stratagem.tools.questions import answer
from stratagem.worker.plans.build import _begin_from
from tests.client.cli.command_line import invoke
from tests.jobs import LOSSES, NOT_TRAINED, document, job, user_data, user_model
from tests.odd_kinds import BUILT, TRAINED, Kind
from tests.repository import ROOT
from tests.stream_jobs import streamed
from tests.tools.memory.support import SITE, federation, kind_job, replicas
from tests.userland.models import mlp

NOT_HERE = {"digest": "0" * 64}
FEDERATED = federation({"method": "FedAvg"})
EXAMPLE = ROOT / "examples" / "digits_local.yaml"


def found(spec: JobSpec) -> list[Finding]:
    return check_job(spec, SITE, lambda: "little")


def faults(spec: JobSpec) -> dict[str, str]:
    """The faults of a job: what is found, by the field."""
    return {f.about: f.found for f in found(spec) if f.level is Level.FAIL}


TESTED_BY_TWO = {"accumulation": {"micro_batch_size": 2}, "evaluation": {"split": "test"}}


def divided(what: str) -> dict[str, Any]:
    return {**replicas(2), "options": {"partition_state": what}}


@pytest.mark.parametrize(
    "spec",
    [
        kind_job("cnn", execution={"precision": "Mixed", "amp_dtype": "bfloat16"}),
        job("tied", data=user_data("tokens"), loss="token_cross_entropy"),
        job("dropout_mlp", compression={"codec": "int8"}, strategy=replicas(3)),
        job(execution={"gradient": {"Accumulated": 4}}, phases={}, data=user_data("noisy_rows")),
        job(execution={"parallelism": {"PipelineParallel": 2}}),
        job(strategy=divided("optimizer")),
        job("batch_norm_mlp", strategy=divided("full"), **TESTED_BY_TWO),
        job(
            loss=None,
            step="tests.userland.steps:noisy",
            predict="tests.userland.steps:prediction",
            evaluation={"split": "test", "metrics": ["accuracy"]},
            optimizer={
                "entrypoint": "tests.userland.optimizers:SignMomentum",
                "lr": 0.1,
                "schedule": "tests.userland.schedules:sequential",
            },
        ),
    ],
)
def test_a_good_job_has_no_fault(spec: JobSpec) -> None:
    findings = found(spec)
    assert [f for f in findings if f.level is not Level.OK] == []
    assert {f.check for f in findings} >= {"code", "model", "data", "order", "step", "resume"}


def test_what_a_precision_converts_is_said() -> None:
    model = user_model("in_dtypes", dtypes=["float64", "float32"])
    for own, number in (({}, 0), ({"precision": "Mixed"}, 1)):
        findings = found(job(model, execution=own))
        said = [f.found for f in findings if f.about == "execution.precision"]
        assert len(said) == number
        assert all("Mixed converts 2 tensors of float64 of the model" in text for text in said)


def test_an_error_of_the_users_code_is_told_with_its_input_and_its_lines_alone() -> None:
    """Neither frames of the engine and of torch nor a traceback that is not there."""
    batches = {**user_data("noisy_rows"), "collate": "tests.userland.data:noisy_batch"}
    spec = job(model=user_model("Residual"), data=batches)
    (fault,) = [f for f in found(spec) if f.level is Level.FAIL]
    assert fault.found.startswith("TypeError: linear(): argument 'input' (position 1) must be")
    assert (
        "model Residual was called with {'jitter': float32[], 'x': float32[2, 12], " in fault.found
    )
    assert "each batch is one dict" in fault.found
    first, *frames = fault.advice.splitlines()
    assert first == "training step 1, at"
    assert "tests/userland/models.py" in frames[0]
    assert not any("site-packages" in line or "stratagem/" in line for line in frames)
    spec = job(model=user_model("token_model"), data=user_data("tokens"))
    (fault,) = [f for f in found(spec) if f.level is Level.FAIL]
    assert fault.found.endswith("are for `loss: token_cross_entropy`")
    assert fault.advice == "training step 1"


BAD_CODE = {
    "evaluation": {"split": "test", "metrics": ["tests.userland.metrics:gone"]},
    "data": {**user_data("noisy_rows"), "collate": "tests.userland.data:gone"},
}
IN_16_BITS = user_model("in_dtypes", dtypes=["bfloat16"])
IN_BOTH = user_model("in_dtypes", dtypes=["float32", "float64"])
AGAIN = "row 0 is not the same when data.entrypoint is called again"
OWN_OPTIMIZER = {"entrypoint": "tests.userland.optimizers:CountsItself", "lr": 0.1}
GROUPS = {"name": "sgd", "lr": 0.1, "groups": [{"name": "g", "match": ["nope.*"]}]}
BY_ROW = {
    "unit": "row",
    "clip": {"norm": 0.5},
    "noise_multiplier": 0.3,
    "target": {"delta": 1e-5},
    "noise": "seeded",
}
ORDERED = {**user_data("classes"), "order": "tests.userland.orders:gone"}
COUNTING = {"model": user_model("CountsEvaluations"), "evaluation": {"split": "test"}}
TESTED = {"split": "test", "metrics": ["tests.userland.metrics:with_weight"]}
CODED = {"model": IN_BOTH, "compression": {"codec": "int8"}, "strategy": replicas(3)}


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"optimizer": GROUPS}, "optimizer.groups[0]", ""),
        ({"optimizer": OWN_OPTIMIZER}, "optimizer.entrypoint", "'num_steps' was 2 and is 0"),
        ({"model": {**user_model("mlp"), "freeze": ["nope"]}}, "model.freeze[0]", "fits no"),
        ({"data": user_data("impure_rows")}, "data.train", "row 0 is not the same"),
        ({"evaluation": {"split": "dev"}}, "evaluation.split", 'no split "dev"'),
        ({"loss": "tests.userland.losses:broken_loss"}, "loss", ""),
        ({"data": user_data("unseeded")}, "data.train", f"{AGAIN}: the row[0] differs"),
        ({"data": streamed("unseeded")}, "data.train", AGAIN),
        (CODED, "compression.codec", "4.weight is float64, 4.bias is float64"),
        (
            {"model": IN_16_BITS, "strategy": FEDERATED, "privacy": BY_ROW},
            "model",
            "1.weight is bfloat16, which rounds the gradient of a row before it is clipped",
        ),
        (
            {"model": user_model("in_dtypes", dtypes=["bfloat16"], casts_rows=False)},
            "loss",
            "the floats of the rows are float32, those of the model bfloat16: convert them",
        ),
        ({"data": user_data("torn_rows")}, "data.train", "row 24 is torn"),
        ({"data": ORDERED}, "", ""),
        (COUNTING, "evaluation", 'buffer "calls" changed while'),
        ({"evaluation": TESTED}, "evaluation.metrics", ""),
    ],
)
def test_a_fault_is_found_and_named(changes: dict[str, Any], field: str, text: str) -> None:
    told = faults(job(**changes))
    assert any(about.startswith(field) and text in said for about, said in told.items()), told


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("reads_elsewhere", "full, but the model reads 1.weight outside of the forward pass"),
        ("gives_a_weight", "full, but the model reads 1.weight outside of the forward pass"),
        ("reads_in_evaluations", "full, but the model reads 1.weight outside of the forward pass"),
        ("writes_itself", "full, but a forward pass of Clamped has changed its parameters"),
        ("shares_with_what_is_frozen", "full needs parameters with storage of their own; 3.we"),
    ],
)
def test_a_model_whose_parameters_cannot_come_and_go_is_found(model: str, text: str) -> None:
    sections = {"model": user_model(f"slices:{model}"), "evaluation": {"split": "test"}}
    told = faults(job(**sections, strategy=divided("full")))
    assert told.pop("strategy.options.partition_state").startswith(text)
    assert not told, "nothing but that"


@pytest.mark.parametrize("kind", [BUILT[0], BUILT[-1], TRAINED[0]], ids=str)
def test_a_kind_of_tensor_that_is_refused_is_found_with_the_sentence_of_the_run(kind: Kind) -> None:
    spec = job(kind.entrypoint, **kind.sections)
    told = [each.found for each in found(spec) if each.level is Level.FAIL]
    assert any(re.search(kind.refused, text) for text in told)


def test_warnings_name_what_is_carried_out_in_another_way_or_gets_no_gradient() -> None:
    findings = found(job(user_model("odd_models:Embedded")))
    said = [each.found for each in findings if each.check == "settings"]
    assert [text.partition(":")[0] for text in said] == ['module "words"', 'module "unused"']
    (warning,) = (
        f for f in found(job(model=user_model("acting_models:Idle"))) if f.level == "warn"
    )
    assert warning.check == "step"
    assert "idle.weight, idle.bias got no gradient" in warning.found


def test_data_without_rows_to_train_on_are_a_fault_that_is_said_as_the_run_says_it() -> None:
    for strategy in ({"type": "Local"}, FEDERATED):
        told = faults(job(data=user_data("test_only"), strategy=strategy))
        assert told == {"data": 'has no split "train"; it has: test'}
    weights = {"initial": {"digest": "0" * 64}, "evaluation": {"split": "test"}}
    assert not faults(job(data=user_data("test_only"), **weights, **NOT_TRAINED))


@pytest.mark.parametrize("what", ["optimizer", "full"])
def test_a_job_that_trains_nothing_has_no_slices_to_try(what: str) -> None:
    spec = job(strategy=divided(what), evaluation={"split": "test"}, **NOT_TRAINED)
    assert faults(spec) == {}


def test_all_faults_are_found_at_once_and_each_is_said_once() -> None:
    told = found(job(model=user_model("gone"), **BAD_CODE))
    failed = [f for f in told if f.level is Level.FAIL]
    abouts = [f.about for f in failed]
    assert {"model.entrypoint", "data.collate", "evaluation.metrics[0]"} <= set(abouts)
    (model,) = (f for f in failed if f.about == "model.entrypoint")
    assert model.check == "code"
    assert 'no attribute "gone"' in model.found
    assert told[-1].found == "not tried: needs the model and the data, which failed"


def test_a_model_that_keeps_something_elsewhere_is_found() -> None:
    telling = job(model=user_model("acting_models:Forgetful"))
    assert "other bits" in faults(telling)[""]
    allowed = job(model=telling.model.document(), execution={"deterministic": False})
    assert not faults(allowed)


def test_memory_that_cannot_be_estimated_is_no_fault() -> None:
    def refuses() -> str:
        raise InvalidInputError.at("loss", "reads values")

    *others, last = check_job(job(), SITE, refuses)
    assert (last.level, last.found) == (Level.WARN, "cannot be estimated: loss: reads values")
    assert {each.level for each in others} == {Level.OK}


def test_a_step_that_fails_is_said_once() -> None:
    """Without a traceback where nothing was raised, and not again as a fault of the memory."""
    told = found(job(loss="tests.userland.losses:infinite_loss"))
    (fault,) = (f for f in told if f.level is Level.FAIL)
    assert fault.about == "loss"
    assert "non-finite" in fault.found
    assert "accumulation.non_finite: skip_step" in fault.found
    assert "traceback" not in fault.advice
    last = told[-1]
    assert (last.check, last.found) == ("memory", "not estimated: needs a step, which failed")
    (wrong,) = (
        f.found for f in found(job(loss="tests.userland.losses:three_values")) if f.level == "fail"
    )
    assert wrong.endswith("must be a loss or (loss, weight), not 3 values")
    assert 'what "tests.userland.losses:three_values" returns' in wrong


@pytest.mark.parametrize(("loss", "is_warned"), [("summed", True), ("half_squared", False)])
def test_a_loss_that_is_a_sum_over_rows_is_a_warning(loss: str, is_warned: bool) -> None:
    told = [each.found for each in found(job(loss=f"{LOSSES}:{loss}")) if each.level == "warn"]
    said = f"{LOSSES}:summed is twice as large for each row twice: a sum over rows, not their mean"
    assert told == ([said] if is_warned else [])


def test_the_steps_of_a_federation_are_those_of_a_client() -> None:
    for changes, said in (
        ({}, "2 clients, 2 steps to a local epoch"),
        ({"partition": {"method": "by_label"}}, "2 clients; the steps of each follow from its own"),
    ):
        findings = found(job(strategy=FEDERATED, **changes))
        (order,) = (each.found for each in findings if each.check == "order")
        assert order.startswith(said)


def asked_here(request: str, tell: Any, _: object) -> tuple[dict[str, Any], int, str]:
    """As the process that has torch answers: this one has it, too."""
    return {"answer": answer(json.loads(request), lambda told: tell(told["finding"]))}, 0, ""


def test_the_command_ends_with_1_at_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_process, "_exchange", asked_here)
    spec = job(model=user_model("slices:gives_a_weight"), strategy=divided("full"))
    (tmp_path / "job.json").write_text(spec.canonical_json())
    wrong = invoke("check", tmp_path / "job.json", "--format", "json")
    assert wrong.exit_code == 1
    assert "the model reads 1.weight outside" in wrong.stdout
    checks = [finding["check"] for finding in json.loads(wrong.stdout)]
    assert (checks[0], checks[-1]) == ("document", "memory")
    (tmp_path / "job.json").write_text(job().canonical_json())
    good = invoke("check", tmp_path / "job.json")
    assert good.exit_code == 0, good.output
    bad = invoke("check", EXAMPLE, "--set", "batch_size=0", "--set", "loss=x")
    assert bad.exit_code == 1
    assert "batch_size" in bad.stdout
    assert "loss.name" in bad.stdout


def test_what_is_converted_of_given_weights_is_said_before_and_when_the_run_begins(
    tmp_path: Path,
) -> None:
    spec, path = job(), tmp_path / "half.safetensors"
    model = mlp()
    given = {name: tensor.half() for name, tensor in model.state_dict().items()}
    given["0.bias"] = given["0.bias"].float()
    save_file(given, path)
    begun = spec.with_changes(initial=InitialSpec(file=str(path)))
    (told,) = (each for each in found(begun) if each.about == "initial.file")
    names = "0.weight, 2.bias, 2.weight"
    assert told.found == f"is converted to the model's dtypes: {names} from float16 to float32"
    assert told.level is Level.WARN
    said: list[str] = []
    work = SimpleNamespace(job=spec, blob=lambda _: (given, {}), warn=said.extend)
    _begin_from(cast("Any", work), InitialSpec(digest=Digest("0" * 64)), model)
    assert said == [f"initial: {told.found}"]
    save_file({name: tensor.float() for name, tensor in given.items()}, path)
    assert not [each for each in found(begun) if each.about == "initial.file"]
    path.unlink()
    assert faults(begun) == {"initial.file": f"{path}: No such file or directory"}


def test_each_row_is_printed_when_it_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        Finding("document", "name", Level.OK, "all fields are valid"),
        Finding("step", "strategy.options.partition_state", Level.WARN, "slow", "wait"),
    ]
    printed: list[list[str]] = []

    def check_rows(_load: object, *, tell: Callable[[Finding], None], **_: object) -> list[Finding]:
        for row in rows:
            tell(row)
            printed.append(
                [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
            )
        return rows

    monkeypatch.setattr(jobs, "check_job", check_rows)
    jobs.check(EXAMPLE)
    assert printed == [
        ["check of found, and what to do", "document name ok all fields are valid"],
        ["step strategy.options.partition_state warn slow", "-> wait"],
    ]


HANGING = """
import threading
import torch

class Hanging(torch.nn.Linear):
    def forward(self, x):
        if x.device.type != "meta" and torch.is_grad_enabled():
            threading.Semaphore(0).acquire()
        return super().forward(x)

def build():
    return torch.nn.Sequential(torch.nn.Flatten(), Hanging(64, 10))
"""


def test_a_check_that_hangs_tells_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs.py").write_text(HANGING)
    (tmp_path / "job.json").write_text(job({"entrypoint": "hangs:build"}).canonical_json())

    def interrupt(text: str) -> None:
        if "hangs.py" in text:
            raise KeyboardInterrupt(text)

    monkeypatch.setattr(torch_process, "_LONG_S", 0.1)
    monkeypatch.setattr(jobs, "complain", interrupt)
    done = invoke("check", tmp_path / "job.json")
    assert done.exit_code == 130
    assert "Sequential, 650 parameters" in done.stdout
    assert "steps to an epoch" in done.stdout
    assert "stopped at training step 1 (hangs.py, line 8, in forward)" in done.stderr


def test_a_cluster_without_fitting_workers_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.client.sdk.torch_process.find_spec", lambda _: None)
    stages = [{"node_ids": nodes, "target": {"Tag": "big"}} for nodes in (["0"], ["1", "2"])]
    direct = {"communication": {"protocol": "Direct"}}
    strategy = {"type": "ModelParallel", "partitions": stages, **direct}
    spec = document("tower", strategy=strategy)
    known = ("w", "i", "h:1", True, 0, "cpu", "", 1, 1, "", (), ("small",), (), "", "tls", "none")
    worker = Worker(*known)

    def told(job: dict[str, Any], *workers: Worker) -> list[Finding]:
        return [f for f in check_file(job, workers=list(workers)) if f.check == "workers"]

    by_field = {f.about: f.found for f in told(spec, worker)}
    assert by_field[""] == "1 are alive: w"
    assert by_field["strategy.partitions[0].target"].startswith("no live worker is")
    (_, lacking) = told(document(data={"worker_local": "clinic"}, strategy=FEDERATED), worker)
    assert lacking.found == 'no live worker has "clinic"'
    coded = document(code=NOT_HERE)
    (_, code) = told(coded, worker)
    assert (code.level, code.about) == (Level.FAIL, "code")
    assert code.found == "no live worker accepts code from jobs: w"
    said = [
        f.found for f in told(coded, worker, replace(worker, worker_id="v", code_policy="signed"))
    ]
    assert "these accept no code from jobs, and are left out: w" in said
    assert "these accept only code that their operator has signed or listed: v" in said
    assert [f.found for f in told(spec)] == ["none is alive and may work"]


def test_a_stream_is_tried_on_its_first_rows() -> None:
    spec = job(data=streamed("shards", streams=2), strategy=replicas(2))
    assert faults(spec) == {}
    said = [finding.found for finding in found(spec)]
    assert "a stream of 6 shards; a shard is read again to go on" in said
    assert not any("has no rows" in text for text in said)
