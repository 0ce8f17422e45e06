"""Errors of plans: which of them the job has brought about, and what is told of those.

Everything else is a defect of ours, and reported as one; so an error of torch that says in a
general type what the job has done is given its own type first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog
import torch

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
_NO_THREAD: Final = "can't start new thread"

log = structlog.get_logger(__name__)


@contextmanager
def typed_errors(work: ExecutionContext) -> Iterator[None]:
    """Turn the RuntimeError by which torch says that the host has no memory into MemoryError, and
    that of an assertion on the device, which is lost then, into an error of the job.

    So is what torch refuses to compute with the tensors of the job's model and data, also where
    our code has called it: a plan that is tried again would fail again."""
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
        if type(error) in _OF_TORCH and _NO_THREAD not in str(error):
            log.error("torch raised outside of the user's code", exc_info=error)
            raise user_error(error, work.holding.activity) from error
        raise


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
