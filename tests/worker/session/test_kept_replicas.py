"""Files with what only one worker has: written whole, read back as they were, deleted in time."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from stratagem.common.base.errors import NotFoundError, SoleCopyLostError
from stratagem.common.tensors.files import blob_digest, file_digest
from stratagem.worker.session.replicas import MAX_RUNS, KeptReplicas

RUN = "run-1"


def state(value: float) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Sizes that do not divide evenly, none among them."""
    tensors = {
        "replica0/optimizer/w/exp_avg": torch.full((7,), value),
        "replica0/optimizer/w/step": torch.tensor(value),
        "replica1/optimizer/empty": torch.zeros(0),
    }
    return tensors, {"step": "4", "format": "1", "replica0/optimizer/w/beta": "0.9"}


@pytest.fixture(params=["folder", "memory"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> KeptReplicas:
    return KeptReplicas(tmp_path / "kept-w" if request.param == "folder" else None)


def test_what_was_written_is_read_and_sent(kept: KeptReplicas) -> None:
    tensors, metadata = state(1.5)
    digest = kept.write(RUN, 3, (tensors, metadata))
    found, numbers = kept.load(RUN, 3, digest)
    assert dict(numbers) == metadata
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    sent = kept.frozen(RUN, 3)
    assert blob_digest(sent.manifest, sent.buffers) == digest


def test_files_of_earlier_commits_and_of_ended_runs_are_deleted(kept: KeptReplicas) -> None:
    digests = {segment: kept.write(RUN, segment, state(segment)) for segment in (2, 3, 11)}
    other = kept.write("run-2", 2, state(9))
    kept.drop_before(RUN, 3)
    with pytest.raises(NotFoundError):
        kept.frozen(RUN, 2)
    for segment in (3, 11):
        kept.load(RUN, segment, digests[segment])
    kept.drop_run(RUN)
    with pytest.raises(SoleCopyLostError, match="segment 11 is not here any more"):
        kept.load(RUN, 11, digests[11])
    kept.load("run-2", 2, other)
    assert kept.unsent == {"run-2"}


def test_a_file_outlives_the_process_but_those_of_open_runs_stay_few(
    tmp_path: Path,
) -> None:
    digest = KeptReplicas(tmp_path).write(RUN, 3, state(1))
    path = tmp_path / RUN / "3.safetensors"
    assert file_digest(path) == digest
    assert path.stat().st_mode & 0o077 == 0
    again = KeptReplicas(tmp_path)
    again.load(RUN, 3, digest)
    assert again.write(RUN, 3, state(2)) != digest
    with pytest.raises(SoleCopyLostError, match="another digest"):
        again.load(RUN, 3, digest)
    for number in range(MAX_RUNS + 2):
        again.write(f"other-{number}", 1, state(number))
    KeptReplicas(tmp_path)
    assert len(list(tmp_path.iterdir())) == MAX_RUNS


def test_a_damaged_file_is_lost(tmp_path: Path) -> None:
    kept = KeptReplicas(tmp_path)
    digest = kept.write(RUN, 3, state(1))
    path = tmp_path / RUN / "3.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:5], b"", whole[:-1] + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(SoleCopyLostError):
            kept.load(RUN, 3, digest)
    path.write_bytes(whole[:5])
    with pytest.raises(NotFoundError):
        kept.frozen(RUN, 3)
