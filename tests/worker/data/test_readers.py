"""Reader processes: what they read is what is read without them, whatever becomes of them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.worker.data.datasets import Gather
from stratagem.worker.data.factory import DataFunction, made_data
from stratagem.worker.data.reader_batches import ReaderSetup
from stratagem.worker.data.readers import ReaderPool, WorkerReaders
from stratagem.worker.data.rows import BatchKeys, ReadOrder, RowDataset
from stratagem.worker.data.sources import DataSources, load_data
from stratagem.worker.user_code import watching
from tests.jobs import job
from tests.patience import PATIENCE_S
from tests.userland.read_rows import BAD_ROW, NUM_ROWS, Twin
from tests.worker.engine.support import ALLOWED, CPU

SEED = 3


@pytest.fixture(scope="module")
def function(tmp_path_factory: pytest.TempPathFactory) -> DataFunction:
    kwargs = {"folder": str(tmp_path_factory.mktemp("rows"))}
    return DataFunction("tests.userland.read_rows:rows", kwargs, "tests.userland.read_rows:collate")


@pytest.fixture(scope="module")
def pool(function: DataFunction) -> Iterator[ReaderPool]:
    """Two processes for all tests of this file."""
    made = ReaderPool(ReaderSetup(function, SEED, ALLOWED), 2)
    made.start()
    yield made
    processes = [psutil.Process(pid) for pid in made.pids]
    made.stop()
    assert not any(process.is_running() for process in processes)


@pytest.fixture(scope="module")
def data(function: DataFunction) -> dict[str, RowDataset]:
    splits = made_data(function, ALLOWED, {}, SEED)
    return {split: each for split, each in splits.items() if isinstance(each, RowDataset)}


def order(dataset: RowDataset, rows: list[int], step: int = 0) -> ReadOrder:
    keys = BatchKeys((SEED, "row", 0), (SEED, step, 0, 0))
    return dataset.order(torch.tensor(rows, dtype=torch.int64), keys)


def assert_alike(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    match expected:
        case Tensor():
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
            assert found.data_ptr() % 64 == 0
        case dict():
            assert list(found) == list(expected)
            for key in expected:
                assert_alike(found[key], expected[key])
        case tuple() | list():
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert_alike(one, other)
        case _:
            assert found is expected is None


@pytest.mark.parametrize("rows", [[], [3], [0, 7, 19, 1, 2, 8, 11]])
@pytest.mark.parametrize("kind", ["noisy", "nested", "plain", "sum"])
def test_a_batch_is_what_it_is_without_readers(
    pool: ReaderPool, data: dict[str, RowDataset], kind: str, rows: list[int]
) -> None:
    wanted = order(data[kind], rows)
    expected = data[kind].read(wanted)
    found = pool.batch(data[kind], wanted)
    assert_alike(found, expected)
    assert (found[0] is found[1]) == (expected[0] is expected[1])
    if kind == "nested" and rows:
        assert isinstance(found[0], Twin)
        assert found[0].swapped().left == ()


def test_batches_are_read_ahead_and_keep_their_memory_while_they_are_used(
    pool: ReaderPool, data: dict[str, RowDataset]
) -> None:
    dataset = data["large"]
    orders = [order(dataset, [step, NUM_ROWS - 1 - step], step) for step in range(10)]
    pool.expect(iter(orders))
    # Out of turn, one of which nobody was told, and one that was expected twice.
    asked = [orders[1], orders[0], order(dataset, [5], 77), *orders[2:]]
    found = [pool.batch(dataset, each) for each in asked]
    for each, one in zip(asked, found, strict=True):
        assert_alike(one, dataset.read(each))
    pool.expect(iter([orders[4], orders[4], orders[5]]))
    pool.expect(iter([orders[5], orders[4]]))
    for each in (orders[5], orders[4]):
        assert_alike(pool.batch(dataset, each), dataset.read(each))


def test_what_users_code_raises_comes_here(pool: ReaderPool, data: dict[str, RowDataset]) -> None:
    """Also where the batch was read ahead; and batches that nobody asks for raise nothing."""
    for kind in ("raises", "text", "sparse"):
        dataset = data[kind]
        bad = order(dataset, [1, BAD_ROW])
        pool.expect(iter([order(dataset, [BAD_ROW, 0]), bad]))
        with pytest.raises((UserCodeError, InvalidInputError)) as caught:
            Gather(torch.float32, CPU, readers=pool)(
                dataset, torch.tensor([1, BAD_ROW]), "a test", bad.keys
            )
        if kind == "sparse":
            assert "dense" in str(caught.value)
            continue
        with pytest.raises(type(caught.value)) as without:
            Gather(torch.float32, CPU)(dataset, torch.tensor([1, BAD_ROW]), "a test", bad.keys)
        assert str(caught.value) == str(without.value)
        if isinstance(without.value, UserCodeError):
            assert isinstance(caught.value, UserCodeError)
            assert caught.value.traceback == without.value.traceback
            assert "row 3 of data.raises" in str(caught.value)


@pytest.mark.parametrize(
    "is_killed", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["ends", "killed"]
)
def test_a_reader_that_dies_is_replaced_and_its_orders_are_repeated(
    pool: ReaderPool, data: dict[str, RowDataset], is_killed: bool
) -> None:
    dataset = data["plain" if is_killed else "ends once"]
    orders = [order(dataset, [step, BAD_ROW], step) for step in range(5)]
    lines: list[tuple[str, str]] = []
    with watching.to(lambda *line: lines.append(line)):
        assert_alike(pool.batch(dataset, orders[0]), dataset.read(orders[0]))
        for pid in pool.pids if is_killed else ():  # before they could read everything ahead
            os.kill(pid, signal.SIGKILL)
        pool.expect(iter(orders[1:]))
        for each in orders[1:]:
            assert_alike(pool.batch(dataset, each), dataset.read(each))
    told = [text.partition(" ended ")[2] for level, text in lines if level == "WARNING"]
    deaths = 2 * ["signal 9"] if is_killed else ["exit status 7"]
    assert told == [f"({how}); another takes its place" for how in deaths]


@pytest.mark.sweep  # each has to import all that a reader needs
def test_rows_that_end_readers_are_named(
    function: DataFunction, data: dict[str, RowDataset]
) -> None:
    pool, dataset = ReaderPool(ReaderSetup(function, SEED, ALLOWED), 1), data["ends"]
    said = r"3 processes ended .* data\.ends: 2, 3 \(while reading rows of data\.ends\)"
    with pytest.raises(UserCodeError, match=said):
        pool.batch(dataset, order(dataset, [2, NUM_ROWS + BAD_ROW]))
    pool.stop()


def test_what_is_printed_is_told_and_a_data_set_that_differs_in_the_reader_is_refused(
    pool: ReaderPool, data: dict[str, RowDataset]
) -> None:
    lines: list[tuple[str, str]] = []
    with watching.to(lambda *line: lines.append(line)):
        pool.batch(data["prints"], order(data["prints"], [4, 5]))
    printed = [line for line in lines if line[0] == "PRINT"]
    assert printed == [("PRINT", "reading row 4"), ("PRINT", "reading row 5")]
    short = RowDataset([1, 2], "plain", 2, torch.stack)
    with pytest.raises(InvalidInputError, match=r"data\.plain: has 2 rows .* 20 in its reader"):
        pool.batch(short, order(short, [0]))


@pytest.mark.sweep  # of which each imports torch
def test_readers_end_with_their_worker(tmp_path: Path) -> None:
    """However that ends, and whatever they do."""
    code = (
        "import os, sys\n"
        "from stratagem.worker.data.factory import DataFunction\n"
        "from stratagem.worker.data.reader_batches import ReaderSetup\n"
        "from stratagem.worker.data.readers import ReaderPool\n"
        "from stratagem.worker.user_code.entrypoints import EntryPoints\n"
        "function = DataFunction('tests.userland.read_rows:rows', {'folder': '.'}, None)\n"
        "pool = ReaderPool(ReaderSetup(function, 0, EntryPoints(['tests.*:*'])), 2)\n"
        "pool.start()\n"
        "open(sys.argv[1], 'w').write(' '.join(map(str, pool.pids)))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "pids")], check=False)
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        try:
            process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            continue
        psutil.wait_procs([process], timeout=PATIENCE_S)
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_worker_has_no_more_readers_than_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    idle = SimpleNamespace(pid=1, end=lambda: ended.append("a reader"))
    monkeypatch.setattr(ReaderPool, "_process", lambda _: idle)
    readers = WorkerReaders(max_readers=3)

    def asking(number: int, **changes: Any) -> Any:
        data = {"entrypoint": "tests.userland.data:noisy_rows", "readers": number}
        return job(data=data, **changes)

    lines: list[tuple[str, str]] = []
    with watching.to(lambda *line: lines.append(line)):
        first = readers.of("first", asking(2), ALLOWED)
        second = readers.of("second", asking(4), ALLOWED)
    assert lines == [
        ("WARNING", "data.readers: the job asks for 4, this worker allows 3 (--max-readers)")
    ]
    assert first is not None
    assert second is not None
    assert readers.of("first", asking(2, steps=9), ALLOWED) is first
    assert readers.of("first", asking(0), ALLOWED) is None
    assert WorkerReaders(0).of("first", asking(2), ALLOWED) is None
    first.start()
    second.start()
    readers.close("third")
    assert (len(first.pids), len(second.pids)) == (2, 1)
    readers.close("first")
    second.start()
    assert (len(first.pids), len(second.pids)) == (0, 3)
    readers.close("second")
    assert (second.pids, len(ended)) == ([], 5)
    # Of three runs the last one reads without: none is ended for another one whose turn it is, as
    # it would be started again at once.
    readers = WorkerReaders(max_readers=2)
    pools = [readers.of(str(number), asking(2), ALLOWED) for number in range(3)]
    for _ in range(3):
        for pool in pools:
            assert pool is not None
            pool.start()
        assert [len(pool.pids) for pool in pools if pool is not None] == [1, 1, 0]
    assert len(ended) == 6


def test_readers_need_an_entry_point_of_rows() -> None:
    noisy = {"entrypoint": "tests.userland.data:noisy_rows"}
    for data, words in (
        ({"path": "x.safetensors", "readers": 1}, r"data\.readers: .*entrypoint"),
        ({**noisy, "prefetch": 1}, r"data\.prefetch: .*readers"),
        ({**noisy, "readers": -1}, r"data\.readers"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            job(data=data)
    with pytest.raises(InvalidInputError, match=r"execution\.memory: .*with data\.readers"):
        job(data={**noisy, "readers": 1}, execution={"memory": "Cached"})
    tensors = {"entrypoint": "tests.userland.data:classes", "readers": 1}
    with pytest.raises(InvalidInputError, match=r"data\.readers: belongs to data sets with len"):
        load_data(job(data=tensors), ALLOWED, DataSources())
