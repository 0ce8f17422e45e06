"""Sites that decide by their own files: what they take part in, and every byte that leaves them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.code_folder import bundle_of
from stratagem.common.base.errors import UserCodeError
from stratagem.common.code.bundle import digest_of
from stratagem.common.code.signatures import make_keys, sign
from stratagem.common.identity.audit import check_lines
from stratagem.common.job import CodeSpec, JobSpec, load_job
from stratagem.common.strategy import Federated
from stratagem.worker.models.build import build_model
from tests.cluster.jobs import ALLOWED, assert_same_bits, cluster_of, federated, outcome_of, train
from tests.jobs import user_data
from tests.reference.loops import federated_loop
from tests.repository import ROOT
from tests.userland.data import rows_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("a site takes part by its own file, which changes no bit"),
]

EXAMPLE = ROOT / "examples" / "sites"
NUM_SITES = 3


def lines_of(folder: Path, ward: int) -> list[dict[str, Any]]:
    """The audit of a site, which is whole."""
    file = folder / f"site-{ward}" / "audit.jsonl"
    with file.open("rb") as lines:
        assert not check_lines(lines).is_torn
    return [json.loads(line) for line in file.read_text().splitlines()]


def site_files(folder: Path) -> list[Path]:
    """The example's file, once for each of three sites with rows of their own."""
    text = (EXAMPLE / "st-anna.toml").read_text()
    files = []
    for ward in range(NUM_SITES):
        file = folder / f"site-{ward}" / "site.toml"
        file.parent.mkdir()
        own = text.replace("ward = 0", f"ward = {ward}")
        file.write_text(own.replace('site = "st-anna"', f'site = "site-{ward}"'))
        files.append(file)
    return files


def sites_of(folder: Path, files: list[Path]) -> LocalCluster:
    arguments = [["--site", str(file)] for file in files]
    return cluster_of(folder, arguments, allow=[], allow_code="none")


@pytest.mark.sweep
def test_three_sites_train_digits_and_write_down_what_left(tmp_path: Path) -> None:
    files = site_files(tmp_path)
    job = load_job(EXAMPLE / "digits.yaml")
    with sites_of(tmp_path, files) as cluster, cluster.client() as client:
        outcome = train(client, job)
        run_id = outcome.run.run_id
        assert isinstance(job.strategy, Federated)
        longer = job.model_copy(update={"strategy": replace(job.strategy, rounds=41)})
        refused = client.submit(longer)
        with pytest.raises(UserCodeError, match=r"max_rounds: strategy.rounds 41 is more than 40"):
            outcome_of(refused)
    assert outcome.status.metrics["test.accuracy"] > 0.9
    assert len(outcome.of("UpdateReceived")) == 20 * NUM_SITES
    for ward in range(NUM_SITES):
        lines = lines_of(tmp_path, ward)
        rounds = [line for line in lines if line["kind"] == "round"]
        assert [line["round"] for line in rounds] == list(range(1, 21))
        assert {line["run"] for line in rounds} == {run_id}
        assert {line["rows"] for line in rounds} == {479}
        assert {line["rule"] for line in rounds} == {1}
        refusals = [line for line in lines if line["kind"] == "refusal"]
        assert refusals
        assert all("max_rounds" in line["reason"] for line in refusals)


SIZES = [11, 30]

# ---- the same bits as without a file, code that comes with jobs, and who submits ----

OPEN = """
site = "site-{number}"
[data.ward]
file = "ward.safetensors"
[[accept]]
data = ["ward"]
entrypoints = ["tests.userland.*:*"]
metrics = ["accuracy"]
{more}
"""


def sites_with_rows(folder: Path, more: str = "") -> list[Path]:
    """Two sites with 11 and 30 rows of their own, as no batch divides: those of `of_sizes`."""
    files = []
    for number, num_rows in enumerate(SIZES):
        own = folder / f"site-{number}"
        own.mkdir()
        train_x, train_y = rows_of(num_rows, seed=number)
        test_x, test_y = rows_of(7, seed=100 + number)
        tensors = {"train.x": train_x, "train.y": train_y, "test.x": test_x, "test.y": test_y}
        save_file(tensors, own / "ward.safetensors")
        (own / "site.toml").write_text(OPEN.format(number=number, more=more))
        files.append(own / "site.toml")
    return files


def ward_job(**changes: Any) -> JobSpec:
    evaluation = {"split": "test", "metrics": ["accuracy"], "batch_size": 2}
    return federated(
        **{
            "num_clients": 2,
            "rounds": 2,
            "data": {"worker_local": "ward"},
            "evaluation": evaluation,
            **changes,
        }
    )


def test_a_site_file_changes_no_bits(tmp_path: Path) -> None:
    files = sites_with_rows(tmp_path)
    with sites_of(tmp_path, files) as cluster, cluster.client() as client:
        outcome = train(client, ward_job())
    rows = user_data("of_sizes", sizes=SIZES, test=True)
    plain = federated(num_clients=2, rounds=2, data=rows)
    assert_same_bits(outcome.state, federated_loop(plain, ALLOWED).state)
    model = build_model(plain, ALLOWED, device=torch.device("cpu"), fresh=True).eval()
    model.load_state_dict(outcome.state)
    pairs = [rows_of(7, seed=100 + number) for number in range(2)]
    right = torch.cat([model(x).argmax(1) == y for x, y in pairs]).double().mean().item()
    assert outcome.status.metrics["test.accuracy"] == pytest.approx(right, rel=1e-12)
    updates = [event.payload["num_samples"] for event in outcome.of("UpdateReceived")]
    assert sorted(updates) == [11, 11, 30, 30]
    for ward, num_rows in enumerate(SIZES):
        rounds = [line for line in lines_of(tmp_path, ward) if line["kind"] == "round"]
        assert [(line["round"], line["rows"]) for line in rounds] == [(1, num_rows), (2, num_rows)]


MODEL = """
from torch import nn
from tests.userland.models import mlp

def build():
    return nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 5))
"""


@pytest.mark.sweep
def test_code_comes_in_where_its_signature_does(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "model.py").write_text(MODEL)
    make_keys(tmp_path / "key", tmp_path / "keys.pem")
    keys = tmp_path / "keys.pem"
    files = sites_with_rows(tmp_path, f'code = "signed:{keys}"')
    text = files[0].read_text().replace('entrypoints = ["tests.userland.*:*"]', "entrypoints = []")
    for number, file in enumerate(files):
        file.write_text(text.replace("site-0", f"site-{number}"))
    digest = digest_of(bundle_of(CodeSpec(path=str(code))))
    signed = {"path": str(code), "signature": sign(digest, tmp_path / "key")}
    brought = {"model": {"entrypoint": "model:build"}, "evaluation": None}
    with sites_of(tmp_path, files) as cluster, cluster.client() as client:
        train(client, ward_job(**brought, code=signed))
        with pytest.raises(UserCodeError, match=rf"code: the bundle sha256:{digest} is not signed"):
            train(client, ward_job(**brought, code={"path": str(code)}))
        # What lies in no bundle is a matter of the entry points, also beside one.
        with pytest.raises(UserCodeError, match=r'entrypoints: model.entrypoint "tests.userland'):
            train(client, ward_job(evaluation=None, code=signed))
    lines = lines_of(tmp_path, 0)
    assert {line["code"] for line in lines if line["kind"] == "round"} == {digest}


@pytest.mark.sweep
def test_sites_add_up_what_runs_may_spend_of_privacy(tmp_path: Path) -> None:
    rule = 'require = ["privacy"]\nmax_epsilon = 60.0\n'
    files = sites_with_rows(tmp_path, rule)
    privacy = {
        "clip": {"norm": 1.0},
        "noise_multiplier": 1.0,
        "target": {"epsilon": 40.0, "delta": 1e-5},
    }
    spec = ward_job(evaluation=None, privacy=privacy)
    with sites_of(tmp_path, files) as cluster, cluster.client() as client:
        outcome = train(client, spec)
        said = r"max_epsilon: privacy.target.epsilon 40 with 40 of other runs is more than 60"
        with pytest.raises(UserCodeError, match=said):
            train(client, spec)
        with pytest.raises(UserCodeError, match="require: the job has no privacy"):
            train(client, ward_job(evaluation=None))
    rounds = [line for line in lines_of(tmp_path, 0) if line["kind"] == "round"]
    assert [(line["run"], line["epsilon"]) for line in rounds] == [(outcome.run.run_id, 40.0)] * 2
