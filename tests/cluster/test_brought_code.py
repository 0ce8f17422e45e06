"""Jobs that bring their code along, on real processes."""

from pathlib import Path

import pytest

from stratagem.client.course.views import Progress
from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk import torch_process
from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import InvalidInputError, NotFoundError, UserCodeError
from stratagem.common.job import JobSpec
from tests.cluster.jobs import (
    ALLOWED,
    assert_same_bits,
    federated,
    model_parallel,
    outcome_of,
    train,
)
from tests.jobs import document, job, user_model
from tests.reference.loops import federated_loop, sharded_loop
from tests.repository import ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("code that a job brings is run, checked and refused by its rules"),
]

MODEL = """
from torch import nn
from helper import HIDDEN

def build():
    return nn.Sequential(nn.Linear(12, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 5))

def metric(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()
"""
TASK = """
import torch
from torch.utils.data import DataLoader, Dataset
from tests.userland.data import classes

class Rows(Dataset):
    def __init__(self, split):
        self.x, self.y = classes()[split]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.x[row], self.y[row]

def data():
    return {split: Rows(split) for split in ("train", "test")}

def counted():
    # Its process finds the class of the rows by name, in this bundle.
    loader = DataLoader(Rows("train"), batch_size=5, num_workers=1)
    assert sum(len(x) for x, _ in loader) == 50
    return data()
"""


def make(folder: Path, hidden: int) -> Path:
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    (folder / "helper.py").write_text(f"HIDDEN = {hidden}\n")
    (folder / "task.py").write_text(TASK)
    return folder


def brought(folder: Path, spec: JobSpec, **sections: object) -> JobSpec:
    """The job with its model, data and a metric from a folder."""
    return JobSpec.parse(
        {
            **spec.document(),
            "model": {"entrypoint": "model:build"},
            "data": {"entrypoint": "task:data"},
            "evaluation": {"split": "test", "metrics": ["model:metric"]},
            "code": str(folder),
            **sections,
        }
    )


def test_two_bundles_of_the_same_names_train_at_once_with_the_bits_of_the_loop(
    client: Client, tmp_path: Path
) -> None:
    """One reads its rows in another process, and one starts such a process itself."""
    narrow, wide = make(tmp_path / "narrow", 7), make(tmp_path / "wide", 16)
    cut = {"0": "worker-0", "1 2": "worker-1"}
    stages = model_parallel(cut, protocol="Pipeline", micro_batch_size=8)
    specs = {
        "read": job(user_model("mlp", hidden=7)),
        "counted": job("mlp"),
        "stages": job("mlp", strategy=stages),
        "clients": federated(),
    }
    data = {
        "read": {"entrypoint": "task:data", "readers": 1},
        "counted": {"entrypoint": "task:counted"},
    }
    runs = {
        name: client.submit(
            brought(
                narrow if name == "read" else wide,
                spec,
                data=data.get(name, {"entrypoint": "task:data"}),
            )
        )
        for name, spec in specs.items()
    }
    expected = {
        "read": sharded_loop(specs["read"], ALLOWED, 1),
        "counted": sharded_loop(specs["counted"], ALLOWED, 1),
        "stages": sharded_loop(specs["stages"], ALLOWED, 1, micro_batch_size=8),
        "clients": federated_loop(specs["clients"], ALLOWED),
    }
    for name, run in runs.items():
        outcome = outcome_of(run)
        assert_same_bits(outcome.state, expected[name].state)
        assert "test.model:metric" in outcome.status.metrics


def test_code_is_its_submitters_and_nothing_else_may_be_named(
    client: Client, tmp_path: Path
) -> None:
    folder = make(tmp_path / "code", 7)
    with pytest.raises(NotFoundError, match=r"code\.digest: no code 0000"):
        client.submit(brought(folder, job(), code={"digest": "0" * 64}))
    with pytest.raises(InvalidInputError, match="is not a folder"):
        client.submit(brought(folder, job(), code=str(folder / "missing")))
    run = client.submit(brought(folder, job(), loss={"entrypoint": "os:system"}))
    with pytest.raises(UserCodeError, match='"os:system" is not allowed on this worker'):
        run.result()
    run = client.submit(brought(folder, job(), requires=["torch", "missing-package>=3"]))
    with pytest.raises(UserCodeError, match="this worker lacks missing-package>=3"):
        run.result()


def test_shared_clusters_take_no_code_unless_their_operator_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The check of the code itself, in a process with torch, is not what this is about.
    monkeypatch.setattr(torch_process, "ask", lambda *_, **__: {"findings": []})
    folder = make(tmp_path / "code", 7)
    with (
        LocalCluster(workers=1, threads=1, import_path=[ROOT], allow_code="none") as cluster,
        cluster.client() as client,
    ):
        spec = brought(folder, job())
        (fault,) = (
            f for f in torch_process.check_job(spec, workers=client.workers()) if f.level == "fail"
        )
        assert fault.found == "no live worker accepts code from jobs: worker-0"
        run = client.submit(spec)
        waiting = next(item for item in run.watch() if isinstance(item, Progress))
        assert "no worker takes code from jobs: worker-0; their operator" in waiting.reason
        run.cancel()
        assert train(client, JobSpec.parse(document())).status.step == 10
        folders = (cluster.folder / "worker-0").glob("code-*/*")
        assert list(folders) == []


def test_a_module_that_has_changed_on_disk_runs_as_it_was_and_the_log_says_so(
    tmp_path: Path,
) -> None:
    folder = make(tmp_path / "code", 7)
    code = {**brought(folder, job()).document()}
    del code["code"]
    spec = JobSpec.parse(code)
    with (
        LocalCluster(
            workers=1,
            threads=1,
            import_path=[folder],
            allow=["model:*", "task:*", "torch.nn.functional:*"],
        ) as cluster,
        cluster.client() as client,
    ):

        def trained() -> tuple[str, list[str]]:
            run = client.submit(spec)
            run.result()
            digest = run.status().commits[-1].digest
            return digest, [line.text for line in run.logs() if line.level == "WARNING"]

        before, told = trained()
        assert told == []
        helper = folder / "helper.py"
        helper.write_text("HIDDEN = 11\n")
        again, told = trained()
        assert told == [
            f"{helper} has changed since this worker has imported helper, which runs as it was: "
            "start the worker anew, or send the files with the job (code: .)"
        ]
        assert again == before
        cluster.kill("worker-0")
        anew, told = trained()
        assert told == []
        assert anew != before
