"""Execute a plan on a worker and stay attached until its result.

After a broken stream the coordinator attaches again; if no process answers at the worker's address
any more, the worker is lost. The messages between Accepted and the result (requests for blobs,
progress, log lines) are passed on.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Final

import structlog
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from stratagem.common.base.errors import (
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    leaves,
    told,
)
from stratagem.common.base.ids import Digest, Party, RunId
from stratagem.common.base.retry import Backoff
from stratagem.common.base.text import is_printable, printable
from stratagem.common.rpc.status_codes import shown
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.core.effect_failures import STEADY_S
from stratagem.coordinator.core.effects import EvaluateState, RunSegment
from stratagem.coordinator.core.facts import ErrorRecord, Member, PartyFailed
from stratagem.coordinator.core.pending import blobs_of
from stratagem.coordinator.effects.context import EffectContext, LiveRuns
from stratagem.coordinator.observe.logs import RunLogLine
from stratagem.coordinator.runtime.links import WorkerLink
from stratagem.coordinator.runtime.supervisor import stop_if_cancelled, task_group
from stratagem.coordinator.store.blobs import BlobStore, StateWriter, file_writer
from stratagem.coordinator.store.leaves import LeafBlobs
from stratagem.v1 import types_pb2, worker_pb2

# ---- Execution ----

FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 5.0
MAX_BROKEN: Final = 5
"""The number of consecutive streams of a plan that may break, each within STEADY_S."""
MAX_PROFILES: Final = 4
"""The number of profiles kept per plan; our workers record the steps once, and the evaluation."""

OnProgress = Callable[[worker_pb2.Progress], None]
OnHistory = Callable[[worker_pb2.HistoryPart], None]
Failed = Callable[[types_pb2.UserError], Awaitable[None]]
LONGEST_CLOSED_S: Final = 8 * 86400.0
"""The longest plausible closing of a site: windows repeat weekly, and clocks may change."""


@dataclass(frozen=True, slots=True)
class PlanListener:
    """The callbacks for the messages of a plan while it is executed."""

    progress: OnProgress | None = None
    history: OnHistory | None = None
    """Receives every part of the step history; all parts again after the stream broke."""


_NOBODY: Final = PlanListener()


async def attend(
    env: EffectContext,
    member: Member,
    request: worker_pb2.ExecuteRequest,
    listener: PlanListener = _NOBODY,
    *,
    base: Digest | None = None,
) -> worker_pb2.ExecuteResult:
    """Execute a plan on a worker, reattaching after broken streams, and return its result.

    A worker that rejects a plan would do so again, so a rejection is a result, too. base: a state
    that the plan certainly needs, sent before the worker asks. Raises UnavailableError once the
    worker is lost, or if stream after stream breaks at once (as on a full disk).
    """
    had_begun, run_id = False, RunId(request.session.run_id)
    plan = _Plan(request, is_secret=_is_secret(env.runs, request))
    backoff, num_broken = Backoff(FIRST_PAUSE_S, LAST_PAUSE_S), 0
    while True:
        began_s = time.monotonic()
        link = env.workers.link(member)
        attended = _Attended(env, member, plan, listener, base)
        refusal: BaseException | None = None
        try:
            return await attended.to_the_end(link)
        except* UnavailableError as group:
            reason = told(group)
        except* InvalidInputError as group:
            if attended.is_accepted:
                raise
            refusal = leaves(group)[0]
        stop_if_cancelled()
        if refusal is not None:
            return _refused(member, refusal)
        had_begun |= attended.is_accepted
        if not await link.answers():
            await env.workers.lose(member, f"connection lost: {reason}", had_begun=had_begun)
            raise UnavailableError(reason)
        if time.monotonic() - began_s > STEADY_S:
            backoff.reset()
            num_broken = 0
        num_broken += 1
        if num_broken >= MAX_BROKEN:  # the effect is tried again without end, and watchers see it
            raise UnavailableError(reason)
        env.runs.say(
            "stream broke, attaching again", run_id, worker_id=member.worker_id, reason=reason
        )
        await backoff.pause()


async def finish(
    env: EffectContext,
    effect: RunSegment | EvaluateState,
    member: Member,
    request: worker_pb2.ExecuteRequest,
    listener: PlanListener,
    *,
    base: Digest | None = None,
    failed: Failed | None = None,
) -> worker_pb2.ExecuteResult | None:
    """Execute a plan (see `attend`), and return its result if it is of the plan's kind.

    Otherwise report the outcome at once, since the other members wait for this one in their
    exchange, and return None. failed: reports an error; by default the party fails.
    """
    result = await attend(env, member, request, listener, base=base)
    match result.WhichOneof("outcome"):
        case "error" if failed is not None:
            await failed(result.error)
        case "error":
            await fail_party(env.runs, effect.run_id, effect.party, result.error)
        case outcome if outcome == request.WhichOneof("plan"):
            return result
        case _:
            await env.workers.end_early(effect.run_id, member, result)
    return None


@dataclass
class _Plan:
    """A plan that a worker executes, over all streams; its job is parsed when needed."""

    request: worker_pb2.ExecuteRequest
    is_secret: bool = False
    """True if nobody may learn that the worker has the plan: its output is then not recorded."""
    num_profiles: int = 0
    """The number of profiles received so far."""

    @cached_property
    def blobs(self) -> frozenset[str]:
        """Return the digests of the blobs that the worker may ask for."""
        return blobs_named(self.request, self._job)

    @property
    def wants_profile(self) -> bool:
        """Return True if the job asks for profiles and fewer than MAX_PROFILES were taken."""
        if self.is_secret or self.num_profiles >= MAX_PROFILES:
            return False
        return bool((self._job.get("execution") or {}).get("profiling"))

    @cached_property
    def _job(self) -> dict[str, Any]:
        job: dict[str, Any] = json.loads(self.request.job_json)
        return job


@dataclass(slots=True)
class _Attended:
    """One stream of a plan: the messages that one Execute call receives from the worker."""

    env: EffectContext
    member: Member
    plan: _Plan
    listener: PlanListener
    base: Digest | None
    is_accepted: bool = False
    is_stalled: bool = False
    under_way: dict[Digest, bool] = field(default_factory=dict)
    """Blobs that are being sent to the worker; a repeated request for one of them waits, too. True:
    send the blob once more afterwards, as the worker may have dropped it."""

    @property
    def request(self) -> worker_pb2.ExecuteRequest:
        return self.plan.request

    @property
    def run_id(self) -> RunId:
        return RunId(self.request.session.run_id)

    async def to_the_end(self, link: WorkerLink) -> worker_pb2.ExecuteResult:
        try:
            return await self._followed(link)
        finally:
            if self.is_stalled:
                self._see_stall(worker_pb2.Stall())

    async def _followed(self, link: WorkerLink) -> worker_pb2.ExecuteResult:
        # Blobs are brought beside the stream: a worker that dies meanwhile must be seen at once.
        async with task_group() as pushes, aclosing(link.execute(self.request)) as messages:
            if self.base is not None:
                pushes.create_task(self._bring(self.base))
            async for message in messages:
                let_in(message, self.member.worker_id)
                match message.WhichOneof("message"):
                    case "need_blob":
                        digest = Digest(message.need_blob.digest)
                        if digest not in self.plan.blobs:
                            return _refused(self.member, _not_named(self.member, digest), "asking")
                        if self._begins_push(digest, message.need_blob.was_here):
                            pushes.create_task(self._push(digest))
                    case "profile" if self.plan.wants_profile:
                        self.plan.num_profiles += 1
                        pushes.create_task(self._keep(message.profile))
                    case "result":
                        return message.result
                    case _:
                        self._note(message)
        raise AssertionError("a stream without a result raises")

    async def _bring(self, base: Digest) -> None:
        if await reads_by_itself(self.env.runs, self.env.transfers.blobs, self.member, base):
            return
        # It may arrive before its plan; the plan then asks for it.
        with suppress(NotFoundError):
            await self.env.transfers.bring(self.member, self.run_id, base)

    def _begins_push(self, digest: Digest, was_here: bool) -> bool:
        """Return True if a request for a blob must start a transfer; False if one is under way.

        The worker may have received an earlier transfer and dropped the blob before this request:
        messages of different streams arrive in any order.
        """
        if digest in self.under_way:
            self.under_way[digest] |= was_here
            return False
        key = (self.member, self.run_id, digest)
        self.under_way[digest] = was_here and key in self.env.transfers.pushes
        return True

    async def _push(self, digest: Digest) -> None:
        is_left = True
        while is_left:
            try:
                await self.env.transfers.push(self.member, self.run_id, digest)
            except NotFoundError:  # a transfer under way came before the plan
                await self.env.transfers.push(self.member, self.run_id, digest)
            is_left, self.under_way[digest] = self.under_way[digest], False
        del self.under_way[digest]

    async def _keep(self, profile: worker_pb2.Profile) -> None:
        session = self.request.session
        profile.party, profile.segment = session.party, self.request.segment
        await asyncio.to_thread(self.env.runs.profiles.add, self.run_id, profile)

    def _note(self, message: worker_pb2.ExecuteResponse) -> None:
        match message.WhichOneof("message"):
            case "accepted":
                self.is_accepted = True
            case "progress" if self.listener.progress is not None:
                self.listener.progress(message.progress)
            case "history" if self.listener.history is not None:
                self.listener.history(message.history)
            case "stall":
                self._see_stall(message.stall)
            case "log" if not self.plan.is_secret:
                line = message.log
                row = RunLogLine(line.time_s, line.worker_id, line.level, line.text)
                self.env.runs.logs.add(self.run_id, row)

    def _see_stall(self, stall: worker_pb2.Stall) -> None:
        """Update the run's status: its worker is stalled, or no longer is."""
        runs, run_id = self.env.runs, self.run_id
        self.is_stalled = runs.stalled.note(run_id, id(self), self.member.worker_id, stall)
        is_secret = runs.draws_in_secret(run_id)
        runs.feed.set_stall(run_id, runs.stalled.sentence(run_id, is_secret=is_secret))


def _is_secret(runs: LiveRuns, request: worker_pb2.ExecuteRequest) -> bool:
    of_client = request.WhichOneof("plan") == "client_round"
    return of_client and runs.draws_in_secret(RunId(request.session.run_id))


def blobs_named(request: worker_pb2.ExecuteRequest, job: Mapping[str, Any]) -> frozenset[str]:
    """Return the digests that a worker may ask for under a plan: the base state, the client's
    state, and the blobs that the job names."""
    plan = getattr(request, request.WhichOneof("plan") or "build")
    named = {
        request.measure.outputs,
        plan.base.digest if "base" in plan.DESCRIPTOR.fields_by_name else "",
        request.client_round.state.digest,
        job.get("data", {}).get("inline"),
        (job.get("code") or {}).get("digest"),
        (job.get("initial") or {}).get("digest"),
    }
    return frozenset(digest for digest in named if digest)


def _not_named(member: Member, digest: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"worker {member.worker_id} asks for blob {shown(digest, 80)}, which its plan does not name"
    )


def _refused(
    member: Member, error: BaseException, activity: str = "reading the job"
) -> worker_pb2.ExecuteResult:
    user_error = types_pb2.UserError(
        type=type(error).__name__,
        message=str(error),
        worker_id=member.worker_id,
        activity=activity,
    )
    return worker_pb2.ExecuteResult(error=user_error)


async def fail_party(
    runs: LiveRuns, run_id: RunId, party: Party, error: types_pb2.UserError
) -> None:
    """Report that a party has failed for good: the user's code raised, or the job is invalid."""
    record = record_of(error)
    said = f"{record.type}: {record.message}" if record.traceback else record.message
    reason = f"{said} (worker {record.worker_id}, {record.activity})"
    await runs.report(run_id, PartyFailed(party=party, reason=reason, error=record))


def record_of(error: types_pb2.UserError) -> ErrorRecord:
    """Convert a worker's error message to an ErrorRecord; an implausible opening time becomes 0."""
    record = ErrorRecord.model_validate(error, from_attributes=True)
    is_likely = 0 < record.opens_in_s <= LONGEST_CLOSED_S  # nothing else checks this number
    return record if is_likely else record.model_copy(update={"opens_in_s": 0.0})


# ---- Sanitizing reports ----
#
# The messages of workers are sanitized: texts have a bounded length and no control characters,
# the number of names is bounded, and a message that names its worker gets the sender's name.
#
# Everything that a worker answers passes here before it becomes a fact, a line of a log or an
# answer to a client. The rules apply to kinds of fields and not to messages, so a new field is
# covered, too.

MAX_WORD_CHARS: Final = 256
MAX_NAMES: Final = 256
"""The number of names (of metrics, splits and the like) in all parts of one message together."""

_SPEAKER: Final = "worker_id"
_TRACEBACK: Final = "stratagem.v1.UserError.traceback"
"""The traceback field. A long traceback is cut at its start, since its end names the exception."""
_LONG: Final = {
    "stratagem.v1.LogLine.text": 8192,
    "stratagem.v1.BuildResult.rows": 8192,
    "stratagem.v1.UserError.message": 10_000,
    _TRACEBACK: 100_000,
}
"""The maximum length of text fields that may be longer than a word and have several lines."""

log = structlog.get_logger()


def let_in(message: Message, worker_id: str = "") -> None:
    """Sanitize a worker's message in place: bound its texts and names, drop control characters.

    worker_id: the sender, which replaces any other worker id in the message.
    """
    admission = _Admission(worker_id)
    admission.of(message)
    if admission.num_left_out:
        log.warning(
            "names of a worker are left out",
            worker_id=worker_id,
            number=admission.num_left_out,
            limit=MAX_NAMES,
        )


@dataclass(slots=True)
class _Admission:
    worker_id: str
    names: set[str] = field(default_factory=set)
    num_left_out: int = 0

    def of(self, message: Message) -> None:
        plan = _plan_of(message.DESCRIPTOR)
        for rule in plan.texts:
            text = getattr(message, rule.name)
            if rule.name == _SPEAKER and self.worker_id:
                setattr(message, rule.name, self.worker_id)
            elif text:
                setattr(message, rule.name, rule.applied(text))
        for rule in plan.words:
            words = getattr(message, rule.name)
            if words:
                replacements = [rule.applied(word) for word in words[:MAX_NAMES]]
                del words[:]
                words.extend(replacements)
        for name in plan.maps:
            self._keep_names(getattr(message, name))
        for name in plan.parts:
            if message.HasField(name):
                self.of(getattr(message, name))
        for name in plan.lists:
            for part in getattr(message, name):
                self.of(part)

    def _keep_names(self, values: MutableMapping[str, Any]) -> None:
        for name in [name for name in values if not self._is_kept(name)]:
            del values[name]
            self.num_left_out += 1
        for name, value in values.items():
            if isinstance(value, str):
                values[name] = printable(value[:MAX_WORD_CHARS], is_line=True)

    def _is_kept(self, name: str) -> bool:
        if name in self.names:
            return True
        if len(self.names) >= MAX_NAMES or len(name) > MAX_WORD_CHARS or not is_printable(name):
            return False
        self.names.add(name)
        return True


@dataclass(frozen=True, slots=True)
class _Rule:
    """The limits on the text of one message field."""

    name: str
    limit: int
    has_lines: bool
    keeps_end: bool

    def applied(self, text: str) -> str:
        cut = text[-self.limit :] if self.keeps_end else text[: self.limit]
        return printable(cut, is_line=not self.has_lines)


@dataclass(frozen=True, slots=True)
class _ReportingPlan:
    """The fields of a message type that hold text, or submessages with text."""

    texts: tuple[_Rule, ...]
    words: tuple[_Rule, ...]
    maps: tuple[str, ...]
    parts: tuple[str, ...]
    lists: tuple[str, ...]


@cache
def _plan_of(descriptor: Descriptor) -> _ReportingPlan:
    fields = list(descriptor.fields)
    strings = [entry for entry in fields if entry.type == FieldDescriptor.TYPE_STRING]
    messages = [entry for entry in fields if entry.message_type is not None]
    maps = [message for message in messages if _entry_of(message) is not None]
    others = [message for message in messages if message not in maps]
    return _ReportingPlan(
        tuple(_rule_of(string) for string in strings if not string.is_repeated),
        tuple(_rule_of(string) for string in strings if string.is_repeated),
        tuple(entry.name for entry in maps if _is_by_name(entry)),
        tuple(other.name for other in others if not other.is_repeated),
        tuple(other.name for other in others if other.is_repeated),
    )


def _rule_of(descriptor: FieldDescriptor) -> _Rule:
    limit = _LONG.get(descriptor.full_name)
    keeps_end = descriptor.full_name == _TRACEBACK
    return _Rule(descriptor.name, limit or MAX_WORD_CHARS, limit is not None, keeps_end)


def _entry_of(descriptor: FieldDescriptor) -> Descriptor | None:
    """Return the entry type of a map field; None if the field is not a map."""
    kind = descriptor.message_type
    return kind if kind is not None and kind.GetOptions().map_entry else None


def _is_by_name(descriptor: FieldDescriptor) -> bool:
    entry = _entry_of(descriptor)
    return entry is not None and entry.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING


# ---- Writing states ----
#
# States come into the store as one file each, or in leaves.


def leaves_in(blobs: BlobStore) -> LeafBlobs | None:
    """Return the store as LeafBlobs if new states are stored as leaves; None if as files."""
    return blobs if isinstance(blobs, LeafBlobs) and blobs.writes_leaves else None


def kept_states(runs: LiveRuns, run_id: RunId) -> list[Digest]:
    """Return a run's retained states, newest commit first; a new state may reuse their leaves."""
    run = runs.state.runs.get(run_id)
    if run is None:
        return []
    digests = blobs_of(run)
    commits = [commit.digest for commit in reversed(run.commits) if commit.digest in digests]
    return [*commits, *sorted(digests - {*commits})]


def may_write_leaves(runs: LiveRuns, leaves: LeafBlobs, member: Member) -> bool:
    """Return True if a worker can write leaves: it sees the folder of states on a trusted network,
    or accepts signed requests to an object store."""
    record = runs.state.workers.get(member.worker_id)
    if record is None:
        return False
    if leaves.signs is not None:
        return record.capability.takes_signed_requests
    return record.capability.writes_states and record.capability.data_plane == "trusted"


async def reads_by_itself(runs: LiveRuns, blobs: BlobStore, member: Member, digest: Digest) -> bool:
    """Return True if a worker can read this state's leaves; otherwise it asks for the state."""
    if not isinstance(blobs, LeafBlobs) or blobs.signs is not None:
        return False
    if not may_write_leaves(runs, blobs, member):
        return False
    return await asyncio.to_thread(blobs.is_in_leaves, digest)


def state_writer(
    runs: LiveRuns, blobs: BlobStore, run_id: RunId, manifest: Manifest
) -> StateWriter:
    """Return a writer for the data of a new state of a run."""
    leaves = leaves_in(blobs)
    if leaves is None:
        return file_writer(blobs, manifest)
    return leaves.state_writer(manifest, kept_states(runs, run_id))
