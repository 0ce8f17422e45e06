"""The files of blobs that a worker has no memory for: they go with it, even if it is killed. A
worker that has no room is waited for."""

import errno
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from stratagem.common.base.errors import LimitError, UnavailableError
from stratagem.common.tensors.files import blob_digest
from stratagem.common.tensors.manifest import Purpose
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.v1 import worker_pb2
from stratagem.worker.host import blobs as module
from stratagem.worker.host.blobs import ReceivedBlobs, _OnDisk
from stratagem.worker.service.sessions import Sessions
from tests.common.tensors.chunk_messages import iter_chunks

OTHER = """
import sys
from pathlib import Path
from stratagem.common.process.process import OwnFolder
print(OwnFolder(Path(sys.argv[1]), sys.argv[2]).path, flush=True)
sys.stdin.read()
"""


def receive(cache: ReceivedBlobs) -> None:
    manifest, buffers = manifest_of({"x": torch.ones(7)}, Purpose.STATE)
    upload = cache.open_upload("run", blob_digest(manifest, buffers), manifest, 1)
    for chunk in iter_chunks(buffers, 0):
        upload.writer.write(chunk)
    cache.commit("run", upload)


def test_files_of_a_killed_worker_are_removed_when_the_next_begins(tmp_path: Path) -> None:
    """And the folder of the next one is made again where somebody has removed it."""
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    folders = []
    with ExitStack() as stack:
        for name in ("w", "w-1", "w"):
            other = subprocess.Popen(
                [*command, f"received-{name}+"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(other.communicate)
            assert other.stdout is not None
            folders.append(Path(other.stdout.readline().strip()))
            (folders[-1] / "run").mkdir()
            (folders[-1] / "run" / "state").touch()
            if len(folders) > 1:
                other.kill()
                other.wait()
        cache = ReceivedBlobs(tmp_path, 0, worker_id="w")
        # Of another name it may be on another machine, whose locks are not seen.
        assert [folder.exists() for folder in folders] == [True, True, False]
        receive(cache)
        (own,) = set(tmp_path.iterdir()) - {*folders}
        assert len([*own.glob("run/*")]) == 1
        cache.drop_run("run")
        assert not [*own.iterdir()]
        receive(cache)
        shutil.rmtree(own)
        cache.drop_run("run")
        receive(cache)
        (again,) = set(tmp_path.iterdir()) - {*folders}
        assert again != own
        cache.clear()
        assert {*tmp_path.iterdir()} == {*folders[:2]}


@pytest.mark.parametrize("where", ["write", "finish", "mkdir"])
def test_a_disk_that_is_full_is_waited_for_and_what_was_torn_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What a failed write has left of the file must not stay in it."""
    cache, real = ReceivedBlobs(tmp_path, 0, worker_id="w"), _OnDisk.sink

    def torn(blob: _OnDisk, offset: int, data: memoryview) -> None:
        real(blob, offset, data[:3])
        full()

    def full(*_: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "no", str(tmp_path / "secret"))

    with monkeypatch.context() as patch:
        match where:
            case "write":
                patch.setattr(_OnDisk, "sink", torn)
            case "finish":
                patch.setattr(_OnDisk, "finish", full)
            case _:
                patch.setattr(Path, "mkdir", full)
        with pytest.raises(UnavailableError, match=r"now: No space left on device$"):
            receive(cache)
        (*uploads,) = cache._uploads.values()
        for upload in uploads:
            upload.is_open = False  # as the caller does
    receive(cache)
    (blob,) = cache._runs["run"].held.values()
    assert torch.equal(blob.load()[0]["x"], torch.ones(7))
    cache.clear()


def test_memory_and_sessions_of_others_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(module, "allocate", none_left)
    with pytest.raises(LimitError) as short:
        receive(ReceivedBlobs(None, 0))
    assert short.value.retry_after_s
    sessions = Sessions(None, 0)  # type: ignore[arg-type]
    with pytest.raises(LimitError, match="max_sessions") as full:
        sessions.begin(worker_pb2.ExecuteRequest(), None)  # type: ignore[arg-type]
    assert full.value.retry_after_s
