"""Which errors of a plan are the job's, and end its run, and which are tried again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stratagem
from stratagem.common.base.errors import UserCodeError
from stratagem.worker.host.exit_record import DeviceHealth
from stratagem.worker.plans.execution import typed_errors

WORK: Any = SimpleNamespace(
    host=SimpleNamespace(health=DeviceHealth()), holding=SimpleNamespace(activity="training")
)


def run_as_ours(text: str) -> None:
    """Run statements in a frame of a file of the project."""
    file = str(Path(next(iter(stratagem.__path__))) / "worker" / "some.py")
    exec(compile(text, file, "exec"), {"torch": torch, "dist": torch.distributed})


@pytest.mark.parametrize(
    "text",
    [
        "torch._foreach_copy_([torch.zeros(2, 2)], [torch.eye(2).to_sparse()])",
        "torch.zeros(2) @ torch.zeros(3)",
        "torch.nn.Linear(2, 2)(torch.zeros(3))",
        "torch.zeros(2, requires_grad=True).sum().backward(torch.zeros(3))",
        "try: torch.zeros(2) @ torch.zeros(3)\n"
        "except RuntimeError as error: raise RuntimeError('parameter w: ' + str(error)) from error",
    ],
)
def test_what_torch_refuses_to_compute_is_the_jobs_wherever_it_was_called(text: str) -> None:
    with pytest.raises(UserCodeError) as caught, typed_errors(WORK):
        run_as_ours(text)
    assert (caught.value.type, caught.value.activity) == ("RuntimeError", "training")


@pytest.mark.parametrize(
    "text",
    [
        "import _thread; _thread.RLock().release()",
        "import threading; threading.Condition().notify()",
        "d = {1: 2}\nfor key in d: d[key + 1] = 1",
        "d = {1: 2}\nlist((d.update({key + 1: 1}), key) for key in d)",
        "raise RuntimeError('begin comes first')",
        'raise RuntimeError("can\'t start new thread")',
        "raise dist.DistError('a peer is gone')",
        "torch.from_file('/none/such', size=3)",
        "torch.save(torch.zeros(3), '/none/such/file')",
    ],
)
def test_what_is_ours_or_the_hosts_or_the_interpreters_is_none_of_the_jobs(text: str) -> None:
    with pytest.raises(RuntimeError) as caught, typed_errors(WORK):
        run_as_ours(text)
    assert not isinstance(caught.value, UserCodeError)


def test_what_torch_says_of_the_host_is_none_of_the_jobs() -> None:
    for message in (
        "unable to mmap 400 bytes from file </dev/shm/a>: Cannot allocate memory (12)",
        "[enforce fail at inline_container.cc:664] . write: No space left on device",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ):
        code = compile(f"raise RuntimeError({message!r})", torch.__file__, "exec")
        with pytest.raises(RuntimeError) as caught, typed_errors(WORK):
            exec(code)
        assert type(caught.value) is RuntimeError
