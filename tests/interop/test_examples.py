"""The examples with libraries that people use, on real workers, beside the loops they replace."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from examples.interop import plain_loop
from stratagem.client.course.views import RunStatus
from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.job import JobSpec, load_job
from stratagem.common.observe.findings import Level
from stratagem.tools.check.check import check_job
from stratagem.tools.memory.estimate import estimate_memory
from stratagem.tools.memory.play import Site
from stratagem.worker.data.sources import DataSources
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.cluster.jobs import assert_same_bits
from tests.reference.evaluation_loop import evaluation_loop
from tests.reference.loops import federated_loop, sharded_loop
from tests.repository import ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.interop,
    pytest.mark.promise("Libraries that people use train on workers with the bits of their loops."),
    # peft asks transformers for what that calls by another name now.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ALLOWED = EntryPoints(["examples.interop.*:*", "lion_pytorch:Lion"])
FOLDER = ROOT / "examples" / "interop"
NEEDS = {
    "gpt2": ["transformers"],
    "bert": ["transformers", "torchmetrics"],
    "lora": ["transformers", "peft"],
    "resnet": ["transformers", "PIL"],
    "text": ["transformers", "datasets"],
    "lion": ["transformers", "lion_pytorch"],
}
LOCAL = {"type": "Local"}
FEDERATED = {
    "type": "Federated",
    "num_clients": 3,
    "rounds": 2,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "All"},
}


@pytest.fixture(scope="module", autouse=True)
def in_one_thread() -> Iterator[None]:
    """As the workers compute: the bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("interop")
    with (
        LocalCluster(
            workers=2,
            threads=1,
            data_dir=folder,
            import_path=[ROOT],
            allow=list(ALLOWED.allow),
            environment={"HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)},
        ) as cluster,
        cluster.client() as client,
    ):
        yield client


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """The module of an example, by its name."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    name = request.param
    for library in NEEDS[name]:
        pytest.importorskip(library, reason="needs the extra interop")
    return importlib.import_module(f"examples.interop.{name}")


def job_of(example: Any, **sections: Any) -> JobSpec:
    """The example's job with some sections replaced; None leaves one out."""
    spec = load_job(FOLDER / f"{example.__name__.rpartition('.')[2]}.yaml")
    document = {**spec.document(), **sections}
    return JobSpec.parse({key: value for key, value in document.items() if value is not None})


def trained(client: Client, spec: JobSpec) -> tuple[dict[str, Tensor], RunStatus]:
    run = client.submit(spec)
    status = run.result().status
    return run.state_dict(), status


@pytest.mark.parametrize("example", NEEDS, indirect=True)
def test_two_workers_have_the_bits_of_the_sharded_loop(client: Client, example: Any) -> None:
    spec = job_of(example)
    state, status = trained(client, spec)
    assert_same_bits(state, dict(sharded_loop(spec, ALLOWED, 2).state))
    assert status.reproducible
    measured = evaluation_loop(spec, ALLOWED, state)
    assert status.metrics.items() >= measured.items()
    assert len(measured) == 1 + len(spec.evaluation.metrics if spec.evaluation else ())
    for suffix in (".py", ".yaml"):
        lines = (FOLDER / f"{example.__name__.rpartition('.')[2]}{suffix}").read_text().splitlines()
        assert len(lines) < 60
    if example.__name__.endswith("lora"):
        changes_nothing_but_what_it_adds(example, spec, state)
    if example.__name__.endswith("bert"):
        has_the_metrics_of_the_plain_loop(example, state, status)


def changes_nothing_but_what_it_adds(example: Any, spec: JobSpec, after: dict[str, Tensor]) -> None:
    torch.manual_seed(spec.seed)
    before = example.build_model().state_dict()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in after if "lora_" in name}


def has_the_metrics_of_the_plain_loop(
    example: Any, state: dict[str, Tensor], status: RunStatus
) -> None:
    assert status.metrics["test.accuracy"] > 0.6, "it has learned what a third would be by chance"
    model = example.build_model()
    model.load_state_dict(state)
    for make in (example.f1, example.auroc):
        batches = [default_collate(example.load()["test"])]
        expected = plain_loop.evaluate(model, batches, make())
        assert status.metrics[f"test.{example.__name__}:{make.__name__}"] == expected


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("example", NEEDS, indirect=True)
def test_a_check_finds_no_fault(example: Any) -> None:
    spec, site = job_of(example), Site(ALLOWED, torch.device("cpu"), DataSources())
    found = check_job(spec, site, lambda: str(estimate_memory(spec, site).total))
    assert [finding for finding in found if finding.level is Level.FAIL] == []


@pytest.mark.parametrize("example", NEEDS, indirect=True)
def test_the_plain_loop_is_equal(client: Client, example: Any) -> None:
    """To rounding errors, which training may enlarge; on one shard, as batch norm sees it."""
    data = {"data": {"entrypoint": "examples.interop.resnet:load", "kwargs": {"augments": False}}}
    spec = job_of(example, strategy=LOCAL, **(data if "resnet" in example.__name__ else {}))
    state, plain = trained(client, spec)[0], example.train()
    if "lion" in example.__name__:  # the signs of gradients of nothing but rounding errors
        losses = [evaluation_loop(spec, ALLOWED, each)["test.loss"] for each in (state, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=0.01)
        return
    torch.testing.assert_close(state, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("example", ["gpt2", "bert"], indirect=True)
def test_dropout_has_the_bits_of_the_sharded_loop(client: Client, example: Any) -> None:
    model = {"entrypoint": f"{example.__name__}:build_model", "kwargs": {"dropout": 0.1}}
    spec = job_of(example, model=model, accumulation={"micro_batch_size": 3}, evaluation=None)
    state, _ = trained(client, spec)
    assert_same_bits(state, dict(sharded_loop(spec, ALLOWED, 2).state))


@pytest.mark.parametrize("example", ["gpt2", "lora"], indirect=True)
def test_federated_clients_have_the_bits_of_the_loop(client: Client, example: Any) -> None:
    optimizer = {"name": "adamw", "lr": 0.01}
    spec = job_of(example, strategy=FEDERATED, optimizer=optimizer, epochs=None, evaluation=None)
    state, _ = trained(client, spec)
    assert_same_bits(state, dict(federated_loop(spec, ALLOWED).state))
