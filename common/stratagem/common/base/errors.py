"""This module defines the one error tree of Stratagem, and describes exceptions in words.

The tree is independent of gRPC: a table in `rpc/status_codes.py` maps errors to status codes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, Self, TypeVar

# ---- Error tree ----
#
#     StratagemError
#     ├── InvalidInputError   the caller's input is wrong; says which fields (also a ValueError)
#     │   ├── OutOfRangeError     an offset or index is beyond the end
#     │   └── UnfitModelError     the job does not fit the model that it names
#     ├── LimitError          a size or count is over its limit
#     ├── DivergedError       numbers of a run have left the range of their type
#     ├── IntegrityError      bytes do not match their checksum or digest
#     ├── StaleError          the fence: the term or membership is older than one already seen
#     ├── NotFoundError       no such run, worker, session, blob
#     ├── ConflictError       clashes with what happens at the same time
#     │   ├── AlreadyExistsError  the name is taken by something else
#     │   └── WrongStateError     impossible in the present state
#     ├── UnauthenticatedError    one side did not prove to the other who it is
#     ├── PermissionDeniedError   the caller is known and has no permission
#     ├── RefusedBySiteError  a site's own file does not accept the job
#     │   ├── SiteClosedError     the site would accept it at another hour
#     │   ├── BudgetSpentError    the rows there have no privacy left to spend on it
#     │   └── KeysLostError       it has no keys of the round of secure aggregation
#     ├── UnavailableError    the other side cannot be reached now; a retry may help
#     │   ├── StandbyError        this coordinator does not lead; another one may
#     │   └── InProgressError     the needed work is under way; the same call learns how it ends
#     ├── UserCodeError       the user's model, data, loss or optimizer raised
#     └── RunFailedError      the run ended without a result; the message is the reason

MAX_VIOLATIONS: Final = 100
"""The largest number of violations that one error lists; a document may have 100,000."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A wrong field: its dotted path ("" = the input as a whole) and what is wrong with it."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class StratagemError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidInputError(StratagemError, ValueError):
    """Invalid input. `violations` names every invalid field, up to 100, not just the first one."""

    violations: tuple[Violation, ...]
    readable: object = None
    """The part of the refused value that is valid, so that rules about other fields can still run
    on it; None if there is none."""

    def __init__(self, message: str = "", *, violations: Iterable[Violation] = ()) -> None:
        self.violations = tuple(islice(violations, MAX_VIOLATIONS))
        super().__init__(message or "; ".join(str(violation) for violation in self.violations))

    @classmethod
    def at(cls, field: str, message: str) -> Self:
        """Make the error for one invalid field."""
        return cls(violations=(Violation(field, message),))


class OutOfRangeError(InvalidInputError):
    """An offset or an index is beyond the end of what exists."""


class UnfitModelError(InvalidInputError):
    """The job does not fit the model that it names, for example because a pattern matches no
    tensor's name. The message is made of the job and of the names and properties of the model's
    tensors and layers; it contains no data."""


class LimitError(StratagemError):
    """A size or a count exceeds its limit; nothing has been allocated for it.

    `retry_after_s`: seconds after which the same request may succeed, if the limit is on
    concurrency.
    """

    retry_after_s: float | None

    def __init__(self, message: str = "", *, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DivergedError(StratagemError):
    """Numbers that a run has computed exceed the range of their type; the same run would compute
    the same numbers again."""


class IntegrityError(StratagemError):
    """Bytes do not match their checksum, digest or announced length."""


class StaleError(StratagemError):
    """A call carries an older leadership term of the coordinator, or an older number of a party's
    membership, than one already seen."""


class NotFoundError(StratagemError):
    """The thing named does not exist."""


class SoleCopyLostError(NotFoundError):
    """A part of a run's state that only one worker had a copy of is lost, or has changed."""


class ConflictError(StratagemError):
    """The request clashes with what exists, or is impossible in the present state."""


class AlreadyExistsError(ConflictError):
    """The name or id is taken by something else."""


class WrongStateError(ConflictError):
    """The object's present state does not allow this; a retry alone does not help."""


class UnauthenticatedError(StratagemError):
    """One side did not prove its identity; a retry with the same files does not help."""


class PermissionDeniedError(StratagemError):
    """The caller's identity is proved, but does not permit this."""


class RefusedBySiteError(StratagemError):
    """The file of a site does not allow the request; the same request gets the same answer."""


class SiteClosedError(RefusedBySiteError):
    """The file of a site allows the request only at other hours; the message says when they begin.
    `opens_in_s`: seconds until then, 0 if that is not known."""

    opens_in_s: float

    def __init__(self, message: str, opens_in_s: float = 0.0) -> None:
        self.opens_in_s = opens_in_s
        super().__init__(message)


class BudgetSpentError(RefusedBySiteError):
    """The privacy budget of the requested rows is spent; the message has the numbers."""


class KeysLostError(RefusedBySiteError):
    """A client no longer has, or never had, the keys of a round of secure aggregation."""


class UnavailableError(StratagemError):
    """The other side cannot be reached or cannot serve now; the same call may succeed later."""


class StandbyError(UnavailableError):
    """The called coordinator is not the leader. `leader`: host:port of the leader, or ""."""

    leader: str

    def __init__(self, message: str, leader: str = "") -> None:
        self.leader = leader
        super().__init__(message)


class InProgressError(UnavailableError):
    """The work that the call needs is under way and takes longer than a call may; the same call,
    repeated, gets the outcome."""


class UserCodeError(StratagemError):
    """The user's own code raised an exception. The error carries its type, message and traceback,
    and is never retried."""

    type: str
    message: str
    traceback: str
    worker_id: str
    activity: str

    def __init__(
        self,
        type: str,  # noqa: A002  (the word of the exception itself)
        message: str,
        traceback: str = "",
        worker_id: str = "",
        activity: str = "",
    ) -> None:
        self.type, self.message, self.traceback = type, message, traceback
        self.worker_id, self.activity = worker_id, activity
        super().__init__(type, message, traceback, worker_id, activity)

    def __str__(self) -> str:
        during = f" (while {self.activity})" if self.activity else ""
        where = f" on {self.worker_id}" if self.worker_id else ""
        return f"{self.type}: {self.message}{during}{where}"


class RunFailedError(StratagemError):
    """The run failed; `reason` is the sentence that every interface shows."""

    reason: str

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


# ---- Exceptions in words ----
#
# A task group wraps the exceptions of its tasks, and nested groups wrap them again; "unhandled
# errors in a TaskGroup (1 sub-exception)" informs nobody. Code that makes a reason, a log line or
# a status of an exception that may have come out of tasks uses these functions.


def leaves(error: BaseException) -> list[BaseException]:
    """Return the individual exceptions inside an exception group, which may be nested, in order."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for exception in error.exceptions for leaf in leaves(exception)]
    return [error]


def sole(error: BaseException) -> BaseException:
    """Return the first exception of a group if all its exceptions have the same type and message;
    otherwise the group itself."""
    causes = leaves(error)
    same = {(type(leaf), str(leaf)) for leaf in causes}
    return causes[0] if len(same) == 1 else error


def led_to(error: BaseException, *, by_handling: bool = True) -> Iterator[BaseException]:
    """Yield the error and then the chain of errors that caused it, each once, even if the chain is
    a cycle.

    by_handling: follow Python's implicit `__context__` too, not only the explicit `__cause__`.
    """
    seen: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        seen.add(id(behind))
        yield behind
        behind = behind.__cause__ or (behind.__context__ if by_handling else None)


def told(error: BaseException) -> str:
    """Return an error's message for people: an error of Stratagem is its text alone, any other has
    its type too; of an exception group, each different text once."""
    return "; ".join(dict.fromkeys(_words(leaf) for leaf in leaves(error)))


def _words(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, StratagemError) and text:
        return text
    name = type(error).__qualname__
    return f"{name}: {text}" if text else name


# ---- Frames ----
#
# A task, a call or a plan keeps the exception that has ended it. Its frames are removed, since
# they may refer to the owner of the exception and thereby form a reference cycle.

E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """Remove the traceback frames of an error, of its causes, and of the parts of a group; return
    the error.

    A frame that refers to the owner of the error makes a reference cycle: what the frames hold,
    inside Python and outside, would not be freed until the garbage collector runs.
    """
    errors: list[BaseException | None] = [error]
    seen: set[int] = set()
    while errors:
        part = errors.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        part.__traceback__ = None
        errors += [part.__cause__, part.__context__]
        if isinstance(part, BaseExceptionGroup):
            errors += part.exceptions
    return error
