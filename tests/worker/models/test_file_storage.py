"""Models that are built in files instead of memory: the same bits, and little memory."""

import ctypes
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import LimitError
from stratagem.worker.models.build import SMALLEST_BYTES, FileStorage, build_model
from tests.jobs import job
from tests.worker.engine.support import ALLOWED, CPU, assert_same_bits


class Mixed(nn.Module):
    """Layers that draw in different ways, a tied weight, and buffers that operations have made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3)
        self.linear = nn.Linear(width, 4 * width, dtype=torch.float64)
        self.embedding = nn.Embedding(20 * width, width)
        self.norm = nn.BatchNorm1d(width)
        self.patches = nn.Parameter(torch.zeros(1, 9 * width, width))
        nn.init.trunc_normal_(self.patches, std=0.02)
        self.square = nn.Linear(2 * width, 2 * width, bias=False)
        nn.init.orthogonal_(self.square.weight)
        self.head = nn.Linear(width, 20 * width, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("places", torch.arange(8 * width**2).view(-1, width).T)
        self.register_buffer("drawn", torch.randn(40 * width, width)[1:])
        self.first, self.second = torch.randn(16 * width, 2 * width).half().chunk(2)


def built(width: int) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of the model, and what the generator draws after it."""
    torch.manual_seed(7)
    model = Mixed(width)
    return {**model.state_dict(), "first": model.first, "second": model.second}, torch.rand(3)


@pytest.mark.parametrize("width", [8, 256])
def test_the_bits_and_the_generator_are_those_of_memory(tmp_path: Path, width: int) -> None:
    wanted, drawn_after = built(width)
    with FileStorage(tmp_path):
        found, drawn = built(width)
    assert drawn.equal(drawn_after)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.equal(wanted[name]), name
        assert (tensor.dtype, tensor.stride()) == (wanted[name].dtype, wanted[name].stride())
    assert list(tmp_path.iterdir()) == []


def test_what_shares_storage_shares_it_in_a_file(tmp_path: Path) -> None:
    with FileStorage(tmp_path):
        torch.manual_seed(7)
        model = Mixed(256)
    assert model.head.weight is model.embedding.weight
    assert model.first.untyped_storage().data_ptr() == model.second.untyped_storage().data_ptr()
    model.first[0, 0] = 5  # it is memory as any other, also after the mode has ended
    assert model.first[0, 0] == 5
    with FileStorage(tmp_path):
        whole = torch.zeros(512, 1024)
        part = whole[3:]
        part.add_(1)
        assert whole.sum() == 509 * 1024  # in-place operations are not moved elsewhere


def test_only_large_cpu_tensors_are_in_files(tmp_path: Path) -> None:
    num = SMALLEST_BYTES // 4
    with FileStorage(tmp_path):
        small, large = torch.empty(num - 1), torch.empty(num)
        nothing = torch.empty(num, device="meta")
        sparse = torch.empty(num, num, layout=torch.sparse_coo)
    assert [mapped(each, tmp_path) for each in (small, large)] == [False, True]
    assert nothing.is_meta
    assert sparse.layout is torch.sparse_coo


def mapped(tensor: Tensor, folder: Path) -> bool:
    """Whether the tensor lies in memory that is mapped from a file of the folder."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return str(folder) in line
    raise AssertionError("nowhere")


def test_the_model_of_a_job_is_built_in_the_folder(tmp_path: Path) -> None:
    size = {"in_features": 1024, "out_features": 1024}
    spec = job({"graph": {"nodes": [{"id": "0", "module": "Linear", "kwargs": size}]}})
    wanted, found = (
        build_model(spec, ALLOWED, device=CPU, fresh=True, folder=folder)
        for folder in (None, tmp_path)
    )
    assert_same_bits(wanted.state_dict(), found.state_dict())
    in_file = [mapped(each.get_parameter("0.weight"), tmp_path) for each in (wanted, found)]
    assert in_file == [False, True]


def test_a_disk_that_is_full_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int, _offset: int, _length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    text = rf"{re.escape(str(tmp_path))} has no room for \d+ bytes of a model: No space left"
    with pytest.raises(LimitError, match=text), FileStorage(tmp_path):
        nn.Linear(1024, 1024)
    assert list(tmp_path.iterdir()) == []


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    text = Path("/proc/self/smaps_rollup").read_text()
    (found,) = re.findall(r"^Anonymous: +(\d+) kB", text, re.MULTILINE)
    return int(found) * 1024


def test_memory_of_the_process_stays_small(tmp_path: Path) -> None:
    ctypes.CDLL(None).malloc_trim(0)  # what tests before have freed would be used again, uncounted
    with FileStorage(tmp_path):
        nn.Linear(1024, 1024)  # imports what the mode needs
        before = anonymous_bytes()
        built = nn.Sequential(nn.Linear(3000, 3000), nn.Linear(3000, 3000))
        grown, held = anonymous_bytes() - before, sum(each.nbytes for each in built.parameters())
    assert grown < held / 4
    before, whole = anonymous_bytes(), bytearray(b"x") * held
    assert anonymous_bytes() - before > len(whole) / 2  # what is measured is measured
