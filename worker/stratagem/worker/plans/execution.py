"""Execute one plan of one session, from its first Execute call to the result that later calls
replay.

`PlanExecution` manages the plan on the event loop (queued, running, finished, running again under a
newer view) and its hand-over to the torch thread. In that thread an error of a plan becomes a typed
result, or the error of every attached call when it is a defect of Stratagem.
"""

import asyncio
import dis
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

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
    without_frames,
)
from stratagem.common.observe import tracing
from stratagem.common.observe.logs import about
from stratagem.v1 import types_pb2
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.host.exit_record import device_fault, told_fault
from stratagem.worker.host.stalls import checking
from stratagem.worker.numerics.model import give_back
from stratagem.worker.plans.build import build, check_supported
from stratagem.worker.plans.client_round import client_round
from stratagem.worker.plans.evaluate import evaluate_state, show
from stratagem.worker.plans.train import Segment, measure, measure_sums, train
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.control import (
    ABORTED,
    CLOSED,
    DRAINED,
    AwaitView,
    CallerGone,
    MemberView,
    Peer,
    PlanStopped,
)
from stratagem.worker.session.states import DEFECT
from stratagem.worker.site.gate import SiteAdmission
from stratagem.worker.user_code import watching
from stratagem.worker.user_code.entrypoints import user_error

# ---- Execution of a plan ----

log = structlog.get_logger(__name__)

DESERTED_S: Final = 5.0
"""Seconds without callers after which a plan is deserted; a coordinator restarts faster."""


class Key(NamedTuple):
    """The key of a plan in its session: (lineage, segment, kind); later plans have greater keys."""

    lineage: int
    segment: int
    kind: str


class ExecutionPhase(Enum):
    ACTIVE = auto()  # queued or running
    FINISHED = auto()
    FAILED = auto()  # after a defect; the next call with this key starts over


def key_of(request: pb.ExecuteRequest) -> Key:
    lineage = request.train.lineage or request.measure.lineage or request.show.lineage
    lineage = lineage or request.evaluate.lineage or request.measure_sums.num_clients
    return Key(lineage, request.segment, request.WhichOneof("plan") or "")


def view_of(request: pb.ExecuteRequest) -> MemberView:
    """Return the membership view in a request; of a plan without a party, one without members."""
    view = request.train.view
    members = tuple(
        Peer(
            member.worker_id,
            member.address,
            range(member.first_shard, member.first_shard + member.num_shards),
        )
        for member in view.members
    )
    return MemberView(request.fence.term, request.fence.membership, view.rank, members)


class PlanExecution:
    """One execution of a plan, until its result. Used on the event loop, except `_run`."""

    def __init__(self, work: ExecutionContext) -> None:
        self.key = key_of(work.request)
        self._work = work
        self._segment = Segment()
        self._phase = ExecutionPhase.ACTIVE
        self._membership = work.control.view.membership  # the membership of a finished result
        self._num_followers = 0
        self._can_go_on: Callable[[], bool] | None = None  # set while it is parked
        self._look: asyncio.TimerHandle | None = None
        self._closing: asyncio.TimerHandle | None = None
        if work.admission is not None and work.admission.open_s is not None:
            loop = work.host.loop
            self._closing = loop.call_later(work.admission.open_s, self._interrupt, CLOSED)
        self._look_later()

    @property
    def phase(self) -> ExecutionPhase:
        return self._phase

    @property
    def work(self) -> ExecutionContext:
        return self._work

    @property
    def is_parked(self) -> bool:
        """True if the plan waits for its party or a caller, and the torch thread is free."""
        return self._can_go_on is not None

    @property
    def is_attended(self) -> bool:
        """True if a call follows the plan."""
        return self._num_followers > 0

    @property
    def is_deserted(self) -> bool:
        """True if no call has followed the plan for a while."""
        return self._work.control.is_deserted

    @property
    def is_ended(self) -> bool:
        """True if the plan was told to end now."""
        return self._work.control.is_interrupted

    def start(self) -> None:
        self._work.host.thread.submit(self._run, self)

    async def follow(self) -> AsyncGenerator[pb.ExecuteResponse, None]:
        """Yield the messages of this plan to one following call, until its outcome."""
        self._num_followers += 1
        self._work.control.set_deserted(False)
        self._unpark()
        try:
            async with aclosing(self._work.outbox.follow()) as messages:
                async for message in messages:
                    yield message
        finally:
            self._num_followers -= 1
            self._look_later()

    def _look_later(self) -> None:
        """Schedule a check, after DESERTED_S, whether any call still follows the running plan."""
        self._forget_to_look()
        if self._num_followers == 0 and self._phase is ExecutionPhase.ACTIVE:
            loop = self._work.host.loop
            self._look = loop.call_later(DESERTED_S, self._look_for_callers)

    def _forget_to_look(self) -> None:
        # The timer refers to this plan, and so to the states of its session.
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _forget_timers(self) -> None:
        self._forget_to_look()
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None

    def _look_for_callers(self) -> None:
        if self._num_followers == 0 and self._phase is ExecutionPhase.ACTIVE:
            method = self._work.request.train.exchange
            is_server = method == pb.EXCHANGE_METHOD_PARAMETER_SERVER
            self._work.control.set_deserted(True, must_cut=is_server)

    def attach(self, request: pb.ExecuteRequest) -> None:
        """Attach a repeated request for the same plan, which may bring a newer membership view."""
        view = view_of(request)
        if view.membership <= self._work.control.view.membership:
            return
        self._work = replace(self._work, request=request)
        self._work.control.set_deserted(False)  # the call follows soon
        self._look_later()
        self._work.control.set_view(view)
        self._unpark()
        if self._phase is ExecutionPhase.FINISHED and self._is_outdated():
            self._again()

    def abort(self) -> None:
        """End the plan, and drop the state of the session with it."""
        self._interrupt(ABORTED)

    def _interrupt(self, reason: str) -> None:
        if self._phase is not ExecutionPhase.ACTIVE:
            return
        self._work.control.interrupt(reason)
        self._unpark()

    def forget_outputs(self) -> None:
        """Free the evaluation results that a finished plan keeps for repeated requests."""
        if self._phase is ExecutionPhase.FINISHED:
            self._segment.evaluated.clear()
            self._segment.outputs.clear()

    def drain(self) -> None:
        if self._phase is ExecutionPhase.ACTIVE:
            self._work.control.drain()
            self._unpark()

    def _park(self, can_go_on: Callable[[], bool]) -> None:
        self._can_go_on = can_go_on
        self._unpark()

    def _unpark(self) -> None:
        """Queue for the torch thread again, once there is work to do."""
        if self._can_go_on is None:
            return
        if self._work.control.is_ending or self._can_go_on():
            self._can_go_on = None
            self.start()

    def _is_outdated(self) -> bool:
        """Return whether the result is of an older membership view; user errors stay valid."""
        result = self._work.outbox.result
        kind = result.WhichOneof("outcome") if result is not None else None
        if kind == "interrupted":
            return True
        is_shared = kind in ("train", "evaluate", "measure")
        return is_shared and self._membership < self._work.control.view.membership

    def _again(self) -> None:
        self._phase = ExecutionPhase.ACTIVE
        self._look_later()
        self._work.outbox.reopen()
        self._work.control.reset()
        self.start()

    def _finished(self, result: pb.ExecuteResult, membership: int) -> None:
        self._phase, self._membership = ExecutionPhase.FINISHED, membership
        self._forget_timers()
        self._work.outbox.finish(result)
        if result.WhichOneof("outcome") != "interrupted" and self._is_outdated():
            self._again()

    def _failed(self, error: BaseException) -> None:
        self._phase = ExecutionPhase.FAILED
        self._forget_timers()
        # Its frames, which refer to tensors, are not needed, as it has been logged.
        self._work.outbox.fail(without_frames(error))

    # ---- Calls in the torch thread ----

    def _run(self) -> None:
        work = self._work
        ids = _ids(work)
        with (
            about(**ids),
            work.host.last_words.at(work.key.run_id, work.key.party),
            watching.to(self._log_line),
            checking(work.control.check),
            tracing.span(
                self.key.kind,
                work.traceparent,
                marks_errors=False,
                worker_id=work.host.worker_id,
                **ids,
            ),
        ):
            try:
                with typed_errors(work):
                    result, membership = _run_plan(work, self._segment)
                if work.job.execution.memory == "MinimalPeak":
                    give_back(work.host.device)
            except AwaitView as parked:
                membership = parked.membership
                work.post(self._park, lambda: work.control.view.membership > membership)
                return
            except CallerGone:
                work.control.let_go()
                work.post(self._park, lambda: self._num_followers > 0)
                return
            except PlanStopped as end:
                work.control.let_go()
                is_lost = end.reason == ABORTED or work.host.health.fault is not None
                work.holding.drop() if is_lost else work.holding.leave()
                result, membership = _stopped(work, end.reason), work.control.view.membership
            except USERS_FAULT as error:
                work.control.let_go()
                work.holding.drop()
                result, membership = users_fault(work, error), work.control.view.membership
                tracing.fail(f"{result.error.type}: {result.error.message}")
            except BaseException as error:  # the supervisor reports it to every caller
                log.error("plan failed", exc_info=error)
                tracing.fail("a defect; see the log")
                work.host.stats.ended[DEFECT] += 1
                work.control.let_go()
                work.holding.drop()
                work.post(self._failed, error)
                return
            if work.admission is not None:
                result = _disclosed(work, work.admission, result)
            outcome = result.WhichOneof("outcome") or DEFECT
            work.host.stats.ended[outcome] += 1
            tracing.note(outcome=outcome, engine=result.train.engine, step=result.train.step)
            submitted_by = work.request.submitted_by or None
            log.info("plan ended", plan=self.key.kind, outcome=outcome, submitted_by=submitted_by)
        work.post(self._finished, result, membership)

    def _log_line(self, level: str, text: str) -> None:
        line = pb.LogLine(
            worker_id=self._work.host.worker_id, time_s=time.time(), level=level, text=text
        )
        self._work.post(self._work.outbox.log, line)
        if self._work.admission is None or self._work.admission.disclosure.shares_logs:
            self._work.host.last_words.line(text)


def _ids(work: ExecutionContext) -> dict[str, Any]:
    """Return the identifiers of an execution for log lines and spans."""
    view = work.control.view
    is_round = work.request.HasField("client_round")
    return {
        "run_id": work.key.run_id,
        "party": work.key.party,
        "segment": None if is_round else work.segment,
        "round": work.segment if is_round else None,
        "term": view.term,
        "membership": view.membership,
    }


def _run_plan(work: ExecutionContext, segment: Segment) -> tuple[pb.ExecuteResult, int]:
    work.control.check()
    if work.control.is_draining or work.host.health.fault is not None:
        raise PlanStopped(DRAINED)
    check_supported(work.job.execution)
    request, membership = work.request, work.control.view.membership
    work.warn_of_changed_code()
    _start_readers(work)
    match request.WhichOneof("plan"):
        case "train":
            return train(work, request.train, segment)
        case "build":
            return pb.ExecuteResult(build=build(work, request.build)), membership
        case "client_round":
            done = client_round(work, request.client_round)
            return pb.ExecuteResult(client_round=done), membership
        case "evaluate":
            return evaluate_state(work, request.evaluate, segment)
        case "measure":
            return pb.ExecuteResult(measure=measure(work, request.measure)), membership
        case "measure_sums":
            metrics = measure_sums(work, request.measure_sums)
            return pb.ExecuteResult(measure_sums=metrics), membership
        case "show":
            return pb.ExecuteResult(show=show(work, request.show)), membership
        case _:
            raise InvalidInputError.at("plan", "is missing")


def _start_readers(work: ExecutionContext) -> None:
    """Start the readers of a job while its party is still joining; pipeline stages without input
    data have none."""
    request = work.request
    if request.WhichOneof("plan") in ("measure", "measure_sums", "show") or request.train.ranks:
        return
    readers = work.readers()
    if readers is not None:
        readers.start()


def _stopped(work: ExecutionContext, reason: str) -> pb.ExecuteResult:
    """Return the result of a plan that was ended; if its site's window has closed, it is an error
    that names the next opening."""
    if reason == CLOSED and work.admission is not None:
        return users_fault(work, work.admission.closed)
    return pb.ExecuteResult(interrupted=pb.Interrupted(reason=reason))


def _disclosed(
    work: ExecutionContext, admission: SiteAdmission, result: pb.ExecuteResult
) -> pb.ExecuteResult:
    """Return the disclosed part of a result, once that is in the site's audit, or the error."""
    try:
        return admission.disclosed(result)
    except RefusedBySiteError as error:
        return users_fault(work, error)


# ---- Errors of plans ----
#
# Errors that the job or the user's code has caused become results. Everything else is reported as a
# defect of Stratagem, so errors of a general type that torch raises because of the job are first
# given a specific type.

# Errors caused by the job, the user's code or the user's sizes; never retried.
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
"""Error types (not subclasses) by which torch refuses tensors; the refusal would recur."""
_OF_THE_HOST: Final = re.compile(
    r"out of memory|allocat\w* memory|shared memory|DefaultCPUAllocator|mmap|no space left|quota"
    r"|open file|writing file|file descriptor|input/output|new thread|temporarily unavailable"
    r"|ALLOC_FAILED|NOT_INITIALIZED|INTERNAL_ERROR|NCCL"
    r"|during iteration|event loop|StopIteration|interpreter shutdown"
    r"|(?:un-acquired|unlocked) lock",
    re.IGNORECASE,
)
"""Words of errors of the interpreter or the host, which may not recur elsewhere or later."""
_TORCH: Final = str(Path(torch.__file__).parent)
_TORCHS_HOST: Final = tuple(f"{_TORCH}/{part}" for part in ("serial", "multiproc", "distributed/"))
"""Parts of torch that handle files, processes and peers instead of numbers."""
_NO_CALLS: Final = ("RAISE_VARARGS", "RERAISE", "FOR_ITER")
"""Bytecodes that raise errors without a call, so not errors of a C++ function of torch."""


@contextmanager
def typed_errors(work: ExecutionContext) -> Iterator[None]:
    """Turn torch's RuntimeError for a lack of host memory into MemoryError, and that for an
    assertion on the device, which is then lost, into an error of the job.

    Refusals of torch to compute with the tensors of the job's model and data become errors of the
    job, too, also where our code has called torch: a repeated plan would fail again. Other
    RuntimeErrors, which our code, the interpreter or the host raises, are unchanged.
    """
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
    """Return whether torch has raised this error about given tensors. An error with a cause, such
    as ours with the name of a parameter, is judged by the cause."""
    if type(error) not in _OF_TORCH or _OF_THE_HOST.search(str(error)):
        return False
    if error.__traceback__ is not None and _is_raised_by_torch(error.__traceback__):
        return True
    return error.__cause__ is not None and _is_refusal_of_torch(error.__cause__)


def _is_raised_by_torch(trace: TracebackType) -> bool:
    """Return whether the error comes from torch: its innermost frame is torch's, or is ours and has
    called a function without a frame, such as one in C++."""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    if code.co_filename.startswith(_TORCH):
        return not code.co_filename.startswith(_TORCHS_HOST)
    is_ours = code.co_filename.startswith(tuple(stratagem.__path__))
    return is_ours and dis.opname[code.co_code[trace.tb_lasti]] not in _NO_CALLS


def users_fault(work: ExecutionContext, error: BaseException) -> pb.ExecuteResult:
    """Return the result for an error that the user's code or the job has caused.

    Our own errors about the job come without a traceback, which would show our code.
    """
    activity = work.holding.activity
    match error:
        case UserCodeError():
            fault = error
        case StratagemError():
            fault = UserCodeError(type(error).__name__, str(error))
        case _:
            fault = user_error(error, activity)
    if work.admission is not None:
        fault = work.admission.error(error, activity, fault)
    return pb.ExecuteResult(
        error=types_pb2.UserError(
            type=fault.type,
            message=fault.message,
            traceback=fault.traceback,
            worker_id=work.host.worker_id,
            activity=fault.activity or activity,
            opens_in_s=error.opens_in_s if isinstance(error, SiteClosedError) else 0.0,
        )
    )
