"""Sources, order of rows, partitions, gathering."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError, NotFoundError, UserCodeError
from stratagem.worker.data import sources
from stratagem.worker.data.datasets import Gather, as_dataset
from stratagem.worker.data.order import BatchOrder, epoch_order
from stratagem.worker.data.sources import (
    ClientData,
    ClientShare,
    DataSources,
    by_label,
    contiguous,
    dirichlet,
    from_tensors,
    load_data,
)
from tests.cluster.jobs import federated
from tests.jobs import user_data
from tests.userland.data import rows_of
from tests.worker.engine.support import ALLOWED, CPU


def data_job(data: dict[str, Any], **changes: Any) -> Any:
    return federated(data=data, num_clients=4, **changes)


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 5))
def test_every_epoch_has_every_row_once(num_rows: int, batch_size: int, seed: int) -> None:
    order = BatchOrder(num_rows, batch_size, seed)
    for epoch in range(2):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        batches = [order.batch(step) for step in steps]
        assert {each for each, _ in batches} == {epoch}
        assert sorted(torch.cat([rows for _, rows in batches]).tolist()) == list(range(num_rows))


def test_position_follows_from_the_step_alone() -> None:
    walked, jumped = BatchOrder(50, 16, 3), BatchOrder(50, 16, 3)
    for step in range(7):
        walked.batch(step)
    assert torch.equal(walked.batch(7)[1], jumped.batch(7)[1])
    # An order of several blocks.
    assert torch.equal(BatchOrder(600, 1, 3).batch(1_199)[1], epoch_order(600, 4)[599:])
    # An order of the user's whose epoch is one batch.
    assert BatchOrder(4, 4, 0, lambda _epoch: torch.arange(4)).batch(1)[0] == 1
    with pytest.raises(InvalidInputError, match="no rows"):
        BatchOrder(0, 4, 0)


@settings(max_examples=40)
@given(st.data())
def test_partitions_give_every_row_to_one_client(data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.integers(0, 4), max_size=60))
    labels = torch.tensor(drawn, dtype=torch.int64)
    num_clients = data.draw(st.integers(1, 7))
    seed = data.draw(st.integers(0, 3))
    for parts in (
        contiguous(len(labels), num_clients),
        by_label(labels, num_clients, 2, seed),
        dirichlet(labels, num_clients, 0.3, seed),
    ):
        assert len(parts) == num_clients
        assert sorted(torch.cat(parts).tolist()) == list(range(len(labels)))
    if len(labels) >= num_clients:
        assert all(len(part) for part in dirichlet(labels, num_clients, 0.05, seed))


def test_partitions_are_skewed_and_repeatable() -> None:
    labels = torch.arange(10).repeat(30)
    parts = by_label(labels, 5, 2, 0)
    assert all(len(labels[rows].unique()) <= 3 for rows in parts)
    again = by_label(labels, 5, 2, 0)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    first, second = dirichlet(labels, 5, 0.5, 1), dirichlet(labels, 5, 0.5, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("method", ["contiguous", "by_label", "dirichlet"])
def test_clients_of_one_data_set_see_their_rows_only(method: str) -> None:
    spec = data_job({"entrypoint": "tests.userland.data:classes"}, partition={"method": method})
    clients = [
        load_data(spec, ALLOWED, DataSources(), ClientShare(c, 4))["train"] for c in range(4)
    ]
    rows = torch.cat([each.take(torch.arange(len(each)))[0] for each in clients])
    whole = load_data(spec, ALLOWED, DataSources())["train"].take(torch.arange(50))[0]
    assert sorted(rows[:, 0].tolist()) == sorted(whole[:, 0].tolist())


@pytest.mark.parametrize("method", ["contiguous", "by_label", "dirichlet"])
def test_data_that_clients_share_are_loaded_and_divided_once(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = data_job({"entrypoint": "tests.userland.data:classes"}, partition={"method": method})
    data = ClientData(spec, ALLOWED, DataSources())
    data.of(ClientShare(0, 7))
    monkeypatch.setattr(sources, "load_data", None)
    monkeypatch.setattr(sources, "client_rows", None)
    found = [data.of(ClientShare(number, 7)) for number in range(7)]
    monkeypatch.undo()
    for number, splits in enumerate(found):
        alone = load_data(spec, ALLOWED, DataSources(), ClientShare(number, 7))
        assert splits.keys() == alone.keys()
        rows = torch.arange(len(alone["train"]))
        assert len(splits["train"]) == len(rows)
        for one, other in zip(splits["train"].take(rows), alone["train"].take(rows), strict=True):
            assert torch.equal(one, other)


def test_data_made_per_client_are_kept_for_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_CLIENTS_KEPT", 2)
    spec = data_job({"entrypoint": "tests.userland.data:per_client"})
    assert len(load_data(spec, ALLOWED, DataSources())["train"]) == 40
    data = ClientData(spec, ALLOWED, DataSources())
    first, second = data.of(ClientShare(0, 4)), data.of(ClientShare(1, 4))
    assert len(second["train"]) == 10
    assert data.of(ClientShare(0, 4)) is first
    data.of(ClientShare(2, 4))
    assert data.of(ClientShare(0, 4)) is first
    assert data.of(ClientShare(1, 4)) is not second


def test_files_inline_and_local_data(tmp_path: Path) -> None:
    tensors = {
        "train.x.left": torch.rand(6, 2),
        "train.x.right": torch.rand(6, 3),
        "train.y": torch.arange(6),
        "test.x": torch.rand(2, 2),
        "test.y": torch.arange(2),
    }
    save_file(tensors, tmp_path / "data.safetensors")
    path = str(tmp_path / "data.safetensors")
    by_path = load_data(data_job({"path": path}), ALLOWED, DataSources())
    x, y = by_path["train"].take(torch.tensor([4, 1]))
    assert torch.equal(x["right"], tensors["train.x.right"][[4, 1]])
    assert y.tolist() == [4, 1]
    digest = "a" * 64
    inline = load_data(data_job({"inline": digest}), ALLOWED, DataSources(inline=tensors))
    assert len(inline["test"]) == 2
    with pytest.raises(NotFoundError, match=digest):
        load_data(data_job({"inline": digest}), ALLOWED, DataSources())
    local = DataSources(worker_local={"scans": path})
    own = load_data(data_job({"worker_local": "scans"}), ALLOWED, local, ClientShare(2, 4))
    assert len(own["train"]) == 6
    with pytest.raises(NotFoundError, match="it has: scans"):
        load_data(data_job({"worker_local": "notes"}), ALLOWED, local)
    with pytest.raises(NotFoundError, match="no file"):
        load_data(data_job({"path": "/nowhere.safetensors"}), ALLOWED, DataSources())
    (tmp_path / "bad.safetensors").write_bytes(b"not tensors")
    with pytest.raises(InvalidInputError, match="not a safetensors file"):
        load_data(data_job({"path": str(tmp_path / "bad.safetensors")}), ALLOWED, DataSources())


def test_a_job_reads_files_of_data_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"train.x": torch.rand(3, 2), "train.y": torch.arange(3)}
    for folder in ("data", "data-of-others"):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "x.safetensors")
    (tmp_path / "data" / "link.safetensors").symlink_to(tmp_path / "data-of-others/x.safetensors")
    (tmp_path / "way-in").symlink_to(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    sources = DataSources(roots=(tmp_path / "data", tmp_path / "more"))
    for inside in ("data/x.safetensors", str(tmp_path / "data/x.safetensors")):
        assert len(load_data(data_job({"path": inside}), ALLOWED, sources)["train"]) == 3
    assert load_data(data_job({"path": "way-in/x.safetensors"}), ALLOWED, sources)
    for outside in (
        "data-of-others/x.safetensors",
        "data/../data-of-others/x.safetensors",
        "data/link.safetensors",
        "/etc/none.safetensors",
    ):
        with pytest.raises(
            InvalidInputError, match=rf"data\.path: .*in no data folder.*{tmp_path}/data"
        ):
            load_data(data_job({"path": outside}), ALLOWED, sources)
    with pytest.raises(InvalidInputError, match=r"--data-root\): none"):
        load_data(data_job({"path": "data/x.safetensors"}), ALLOWED, DataSources(roots=()))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ((torch.rand(3, 2), torch.rand(4)), "same number of rows"),
        ((torch.tensor(1.0),), "same number of rows"),
        ("rows", r"data\.train: is a str"),
        ((["a"], ["b"]), "holds a str"),
    ],
)
def test_wrong_data_is_refused(value: Any, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        as_dataset(value, "train")
    with pytest.raises(InvalidInputError, match=r"not named <split>\.x"):
        from_tensors({"train_x": torch.rand(2)})


def test_gathered_rows_own_aligned_storage() -> None:
    class Views:
        storage = torch.arange(40, dtype=torch.float64)

        def __len__(self) -> int:
            return 10

        def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
            return self.storage[1 : 1 + len(indices)], indices

    x, y = Gather(torch.float64, CPU)(Views(), torch.arange(5), "test")
    assert x.data_ptr() % 64 == 0
    assert (x.tolist(), y.dtype) == ([1, 2, 3, 4, 5], torch.int64)
    assert Gather(torch.float32, CPU)(Views(), torch.arange(5), "test")[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("sizes", "num_rows"),
    [([3, 0], 3), ([0, 3], 3), ([0, -1, 0, 5], 5), ([-1, 2], 2), ([0, 0], 0)],
)
@pytest.mark.parametrize("has_test", [False, True])
def test_which_client_has_no_rows_does_not_decide_about_the_model(
    sizes: list[int], num_rows: int, has_test: bool
) -> None:
    """The model is built with the rows of the first client that has any; what is evaluated is, as
    ever, of client 0 of 1."""
    data = user_data("of_sizes", sizes=sizes, test=has_test)
    spec = federated(data=data, num_clients=len(sizes))
    splits = load_data(spec, ALLOWED, DataSources())
    assert len(splits["train"]) == num_rows
    if has_test and sizes[0] >= 0:
        expected = rows_of(7, seed=100)[0]
        assert torch.equal(splits["test"].take(torch.arange(7))[0], expected)


def test_rows_that_no_client_can_load_and_those_to_evaluate_fail_the_build() -> None:
    for sizes, evaluation in (([-1, -1], None), ([-1, 3], {"split": "test"})):
        data = user_data("of_sizes", sizes=sizes)
        spec = federated(data=data, num_clients=2, evaluation=evaluation)
        with pytest.raises(UserCodeError, match="client 0"):
            load_data(spec, ALLOWED, DataSources())
