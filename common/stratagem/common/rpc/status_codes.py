"""Map our errors to gRPC statuses and back, by one table.

A status also carries an ErrorInfo with the name of the error, from which our callers get exactly
the raised type; others have the code and the sentence. Wrong fields are sent as BadRequest
violations.
"""

from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from stratagem.common.base.errors import (
    AlreadyExistsError,
    BudgetSpentError,
    ConflictError,
    DivergedError,
    InProgressError,
    IntegrityError,
    InvalidInputError,
    KeysLostError,
    LimitError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    RefusedBySiteError,
    RunFailedError,
    SiteClosedError,
    SoleCopyLostError,
    StaleError,
    StandbyError,
    StratagemError,
    UnauthenticatedError,
    UnavailableError,
    UnfitModelError,
    UserCodeError,
    Violation,
    WrongStateError,
)
from stratagem.common.base.text import printable

Code = grpc.StatusCode

TABLE: Final[tuple[tuple[type[Exception], grpc.StatusCode], ...]] = (
    # The first row that fits counts, so an error stands before its base.
    (OutOfRangeError, Code.OUT_OF_RANGE),
    (UnfitModelError, Code.INVALID_ARGUMENT),
    (InvalidInputError, Code.INVALID_ARGUMENT),
    (LimitError, Code.RESOURCE_EXHAUSTED),
    (DivergedError, Code.ABORTED),
    (IntegrityError, Code.DATA_LOSS),
    (StaleError, Code.FAILED_PRECONDITION),
    (SoleCopyLostError, Code.NOT_FOUND),
    (NotFoundError, Code.NOT_FOUND),
    (AlreadyExistsError, Code.ALREADY_EXISTS),
    (WrongStateError, Code.FAILED_PRECONDITION),
    (ConflictError, Code.ABORTED),
    (UnauthenticatedError, Code.UNAUTHENTICATED),
    (PermissionDeniedError, Code.PERMISSION_DENIED),
    (SiteClosedError, Code.FAILED_PRECONDITION),
    (BudgetSpentError, Code.RESOURCE_EXHAUSTED),
    (KeysLostError, Code.PERMISSION_DENIED),
    (RefusedBySiteError, Code.PERMISSION_DENIED),
    (StandbyError, Code.UNAVAILABLE),
    (InProgressError, Code.UNAVAILABLE),
    (UnavailableError, Code.UNAVAILABLE),
    (UserCodeError, Code.ABORTED),
    (RunFailedError, Code.ABORTED),
    (TimeoutError, Code.DEADLINE_EXCEEDED),
)

# The errors for codes without one of our names (from gRPC itself, a proxy, another implementation).
_BY_CODE: Final[dict[grpc.StatusCode, type[StratagemError]]] = {
    Code.INVALID_ARGUMENT: InvalidInputError,
    Code.OUT_OF_RANGE: OutOfRangeError,
    Code.RESOURCE_EXHAUSTED: LimitError,
    Code.DATA_LOSS: IntegrityError,
    Code.NOT_FOUND: NotFoundError,
    Code.ALREADY_EXISTS: AlreadyExistsError,
    Code.FAILED_PRECONDITION: WrongStateError,
    Code.ABORTED: ConflictError,
    Code.UNAUTHENTICATED: UnauthenticatedError,
    Code.PERMISSION_DENIED: PermissionDeniedError,
    Code.UNAVAILABLE: UnavailableError,
    Code.DEADLINE_EXCEEDED: UnavailableError,
    Code.CANCELLED: UnavailableError,
}
_BY_NAME: Final = {kind.__name__: kind for kind, _ in TABLE if issubclass(kind, StratagemError)}

_DOMAIN: Final = "stratagem"
# A status must fit into 16 KiB of headers: they contain the message percent-coded, three bytes for
# one, and again in the details, which are coded four bytes for three.
_MAX_MESSAGE_BYTES: Final = 1800
_MAX_DETAIL_BYTES: Final = 6000
_MAX_VIOLATION_BYTES: Final = 1000


def code_of(error: Exception) -> grpc.StatusCode | None:
    """Return the gRPC status code for an error; None for an error that must not be sent."""
    return next((code for kind, code in TABLE if isinstance(error, kind)), None)


def to_status(error: Exception) -> grpc.Status | None:
    """Encode an error as a gRPC status with details; None for an error that must not be sent."""
    code = code_of(error)
    if code is None:
        return None
    status = status_pb2.Status(code=code.value[0], message=shown(str(error)))
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=_DOMAIN)
    if isinstance(error, UserCodeError):
        for key in ("type", "message", "worker_id", "activity"):
            info.metadata[key] = shown(getattr(error, key), _MAX_VIOLATION_BYTES)
    if isinstance(error, StandbyError):
        info.metadata["leader"] = error.leader
    status.details.add().Pack(info)
    if isinstance(error, LimitError) and error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    if isinstance(error, InvalidInputError):
        _add_violations(status, error)
    made: grpc.Status = rpc_status.to_status(status)
    return made


def shown(text: str, max_bytes: int = _MAX_MESSAGE_BYTES) -> str:
    """Return a caller's text fit to show to others: shortened, without control characters."""
    text = printable(text[:max_bytes])
    raw = text.encode(errors="replace")
    if len(raw) <= max_bytes:
        return raw.decode()
    return f"{raw[: max_bytes - 3].decode(errors='ignore')}..."


def _add_violations(status: status_pb2.Status, error: InvalidInputError) -> None:
    request = error_details_pb2.BadRequest()
    for violated in error.violations:
        violation = request.field_violations.add(
            field=shown(violated.field, _MAX_VIOLATION_BYTES),
            description=shown(violated.message, _MAX_VIOLATION_BYTES),
        )
        if status.ByteSize() + request.ByteSize() > _MAX_DETAIL_BYTES:
            request.field_violations.remove(violation)
            break
    status.details.add().Pack(request)


def from_rpc_error(error: grpc.RpcError) -> StratagemError:
    """Decode the error that the other side raised, or make one from gRPC's own report."""
    code, message = error.code(), shown(error.details() or "") or error.code().name
    details = _details(error)
    kind = _BY_NAME.get(details.info.reason) if details.info.domain == _DOMAIN else None
    if kind is UserCodeError:
        fields = {key: shown(value) for key, value in details.info.metadata.items()}
        keys = ("type", "message", "worker_id", "activity")
        kind_, said, worker_id, activity = (fields.get(key, "") for key in keys)
        return UserCodeError(kind_, said, "", worker_id, activity)
    if kind is StandbyError:
        return StandbyError(message, details.info.metadata["leader"])
    if kind is None:
        kind = _BY_CODE.get(code, StratagemError)
    if issubclass(kind, InvalidInputError):
        return kind(message, violations=details.violations)
    if issubclass(kind, LimitError):
        return kind(message, retry_after_s=details.retry_after_s)
    return kind(message)


def name_of(error: grpc.RpcError) -> str:
    """Return the class name of the error that the other side raised; "" if gRPC itself failed."""
    info = _details(error).info
    return str(info.reason) if info.domain == _DOMAIN else ""


@dataclass(frozen=True, slots=True)
class _Details:
    info: error_details_pb2.ErrorInfo
    violations: tuple[Violation, ...] = ()
    retry_after_s: float | None = None


def _details(error: grpc.RpcError) -> _Details:
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry, retry_after_s = error_details_pb2.RetryInfo(), None
    try:
        status = rpc_status.from_call(error)
        for detail in status.details if status else ():
            if detail.Is(info.DESCRIPTOR):
                detail.Unpack(info)
            elif detail.Is(request.DESCRIPTOR):
                detail.Unpack(request)
            elif detail.Is(retry.DESCRIPTOR):
                detail.Unpack(retry)
                retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    except (ValueError, DecodeError):  # the sender's details contradict its code: go by the code
        return _Details(error_details_pb2.ErrorInfo())
    violations = tuple(
        Violation(violation.field, violation.description) for violation in request.field_violations
    )
    return _Details(info, violations, retry_after_s)
