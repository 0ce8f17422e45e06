"""Errors of plans: which of them the job has brought about, and what is told of those.

Everything else is a defect of ours, and reported as one; so an error of torch that says in a
general type what the job has done is given its own type first.
"""

import dis
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final

import structlog
import torch

import stratagem
from stratagem.common.base.errors import (
    InvalidInputError,
    LimitError,
    NotFoundError,
    RefusedBySiteError,
    SiteClosedError,
    StratagemError,
    UserCodeError,
)
from stratagem.v1 import types_pb2
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.host.device_faults import device_fault, told_fault
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.user_code.entrypoints import user_error

# What the job, the user's code or the user's sizes have brought about. Never retried.
USERS_FAULT: Final = (
    UserCodeError,
    InvalidInputError,
    NotFoundError,
    LimitError,
    RefusedBySiteError,
    MemoryError,
    torch.OutOfMemoryError,
    KeyboardInterrupt,
    SystemExit,
)

_OF_TORCH: Final = (RuntimeError, NotImplementedError)
"""The types, and none derived from them, by which torch says that it cannot compute with the
tensors that it is given: it will say so again."""
_OF_THE_HOST: Final = re.compile(
    r"out of memory|allocat\w* memory|shared memory|DefaultCPUAllocator|mmap|no space left|quota"
    r"|open file|writing file|file descriptor|input/output|new thread|temporarily unavailable"
    r"|ALLOC_FAILED|NOT_INITIALIZED|INTERNAL_ERROR|NCCL"
    r"|during iteration|event loop|StopIteration|interpreter shutdown"
    r"|(?:un-acquired|unlocked) lock",
    re.IGNORECASE,
)
"""Words for what another time or place may mend, or for the interpreter's own errors."""
_TORCH: Final = str(Path(torch.__file__).parent)
_TORCHS_HOST: Final = tuple(f"{_TORCH}/{part}" for part in ("serial", "multiproc", "distributed/"))
"""Parts of torch that deal with files, processes and peers, and not with numbers."""
_NO_CALLS: Final = ("RAISE_VARARGS", "RERAISE", "FOR_ITER")
"""Instructions at which an error is not that of a function of torch in C++."""

log = structlog.get_logger(__name__)


@contextmanager
def typed_errors(work: ExecutionContext) -> Iterator[None]:
    """Turn the RuntimeError by which torch says that the host has no memory into MemoryError, and
    that of an assertion on the device, which is lost then, into an error of the job.

    So is what torch refuses to compute with the tensors of the job's model and data, also where
    our code has called it: a plan that is tried again would fail again. A RuntimeError of ours, of
    the interpreter or of the host stays as it is."""
    try:
        yield
    except Exception as error:
        fault = device_fault(error)
        if fault is not None:
            work.host.health.lose(fault)
            if fault.is_the_jobs:
                raise told_fault(error, fault, work.holding.activity) from error
            raise
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):
            raise MemoryError(str(error)) from error
        if _is_refusal_of_torch(error):
            log.error("torch raised outside of the user's code", exc_info=error)
            raise user_error(error, work.holding.activity) from error
        raise


def _is_refusal_of_torch(error: BaseException) -> bool:
    """Return whether torch has raised an error about the tensors that it was given; one that names
    another as its cause, as ours with the name of a parameter do, is what that one is."""
    if type(error) not in _OF_TORCH or _OF_THE_HOST.search(str(error)):
        return False
    if error.__traceback__ is not None and _is_raised_by_torch(error.__traceback__):
        return True
    return error.__cause__ is not None and _is_refusal_of_torch(error.__cause__)


def _is_raised_by_torch(trace: TracebackType) -> bool:
    """Return whether the innermost frame is torch's, or one of ours that has called what has no
    frame, as functions of torch in C++ do not."""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    if code.co_filename.startswith(_TORCH):
        return not code.co_filename.startswith(_TORCHS_HOST)
    is_ours = code.co_filename.startswith(tuple(stratagem.__path__))
    return is_ours and dis.opname[code.co_code[trace.tb_lasti]] not in _NO_CALLS


def users_fault(work: ExecutionContext, error: BaseException) -> pb.ExecuteResult:
    """Return the result for an error that the user's code or the job has caused.

    Errors of our own about the job come without a traceback, which would be of our code.
    """
    activity = work.holding.activity
    match error:
        case UserCodeError():
            told = error
        case StratagemError():
            told = UserCodeError(type(error).__name__, str(error))
        case _:
            told = user_error(error, activity)
    if work.admission is not None:
        told = work.admission.error(error, activity, told)
    return pb.ExecuteResult(
        error=types_pb2.UserError(
            type=told.type,
            message=told.message,
            traceback=told.traceback,
            worker_id=work.host.worker_id,
            activity=told.activity or activity,
            opens_in_s=error.opens_in_s if isinstance(error, SiteClosedError) else 0.0,
        )
    )
