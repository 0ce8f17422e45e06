"""The context in which effects act: the runs that they report about, the calls to workers, and the
transfers between workers and stores.

It also remembers the journaled errors, and lets a worker read a state from an object store by
signed requests.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from weakref import WeakValueDictionary

import grpc.aio
import structlog
from google.protobuf.message import Message

from stratagem.common.base.errors import (
    InvalidInputError,
    LimitError,
    StaleError,
    StratagemError,
    UnavailableError,
    told,
)
from stratagem.common.base.ids import Digest, Party, RunId
from stratagem.common.job import JobSpec
from stratagem.common.privacy.noise import PrivacySecret
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.channel import write_message
from stratagem.common.rpc.status_codes import from_rpc_error
from stratagem.common.rpc.streams import StallTimeout
from stratagem.common.rpc.tensor_transfer import push_frames
from stratagem.common.strategy.strategies import MAX_CLIENTS
from stratagem.common.tensors.files import header_of
from stratagem.common.tensors.leaves import MAX_ASKED, read_list
from stratagem.common.tensors.manifest import Limits, Manifest, to_proto
from stratagem.coordinator.core.commands import DrainWorker, LoseWorker, Report
from stratagem.coordinator.core.effects import Effect, TrainClient
from stratagem.coordinator.core.facts import ROOT, ErrorRecord, Fact, Member
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.pending import pending_of
from stratagem.coordinator.core.state import CoordinatorState
from stratagem.coordinator.core.strategy_calls import draws_in_secret
from stratagem.coordinator.observe.feed import Feed
from stratagem.coordinator.observe.history import LiveHistory
from stratagem.coordinator.observe.logs import RunLogs
from stratagem.coordinator.observe.profiles import Profiles
from stratagem.coordinator.observe.troubles import StalledPlans
from stratagem.coordinator.runtime.links import Links, SharedFrames, WorkerLink, WorkerSession
from stratagem.coordinator.runtime.loop import Loop
from stratagem.coordinator.runtime.settings import Settings
from stratagem.coordinator.runtime.supervisor import Chores, Together, stop_if_cancelled
from stratagem.coordinator.store.blobs import BlobStore
from stratagem.coordinator.store.leaves import LeafBlobs
from stratagem.coordinator.store.step_history import HistoryRow
from stratagem.coordinator.updates.spool import Spool, SpoolKey, SpoolRun
from stratagem.v1 import types_pb2, worker_pb2

# ---- Journaled errors ----
#
# Each exception of a federated round is journaled once. The tracebacks of thousands of clients
# that fail alike would fill the journal.

MAX_ERRORS: Final = 8
"""The number of different exceptions of one round that are journaled."""


@dataclass(slots=True)
class JournaledErrors:
    """The exceptions of each party's newest round that are journaled already. They are kept in
    memory only, so a restarted process journals them again."""

    _rounds: dict[tuple[RunId, Party], tuple[int, set[tuple[str, str]]]] = field(
        default_factory=dict
    )

    def is_new(self, effect: TrainClient, error: ErrorRecord) -> bool:
        """Return True if the error must be journaled, and count it as journaled from now on."""
        number, journaled = self._rounds.get((effect.run_id, effect.party), (0, set()))
        if number != effect.round_num:
            journaled = set()
        self._rounds[effect.run_id, effect.party] = effect.round_num, journaled
        key = (error.type, error.message)
        if key in journaled or len(journaled) == MAX_ERRORS:
            return False
        journaled.add(key)
        return True

    def forget(self, run_id: RunId) -> None:
        """Forget the exceptions of a run that has ended."""
        for key in [key for key in self._rounds if key[0] == run_id]:
            del self._rounds[key]


# ---- Runs ----

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LiveRuns:
    """The runs in the newest durable state, and the means by which effects report about them."""

    loop: Loop
    feed: Feed
    history: LiveHistory
    logs: RunLogs
    profiles: Profiles
    secret: PrivacySecret
    """The secret from which the draws and the noise of private runs are derived."""
    chores: Chores
    refused: Counter[Cause] = field(default_factory=Counter)
    """The number of rejected updates of federated clients since the start, per cause."""
    errors: JournaledErrors = field(default_factory=JournaledErrors)
    stalled: StalledPlans = field(default_factory=StalledPlans)

    @property
    def state(self) -> CoordinatorState:
        """Return the newest durable state."""
        return self.loop.state

    def is_due(self, effect: Effect) -> bool:
        """Return True if the effect is still pending in the newest durable state."""
        run = self.state.runs.get(effect.run_id)
        return run is not None and effect in pending_of(run)

    def job_of(self, run_id: RunId, party: Party) -> JobSpec:
        """Return the party's job: the job of the run, with the changes of the party's
        strategies."""
        run = self.state.runs[run_id]
        return run.strategy.party_job(run.job, run.value, party)

    def metrics_of(self, run_id: RunId, party: Party) -> list[str]:
        """Return the names of the metrics that the party's job asks for."""
        evaluation = self.job_of(run_id, party).evaluation
        return list(evaluation.metrics) if evaluation else []

    def numerics_of(self, run_id: RunId) -> int:
        """Return the version of the numerics rules (common/numerics/rules.py), which fix a run's
        results to the bit."""
        return self.state.runs[run_id].numerics

    def spool_key(
        self, run_id: RunId, party: Party, round_num: int, client: int, attempt: int = 0
    ) -> SpoolKey:
        """Return the key of a client's update in the spool. attempt: the attempt of a secure round;
        each has other masks, so an update of an earlier attempt must not be found."""
        client += attempt * MAX_CLIENTS
        run = self.state.runs.get(run_id)
        of_run = SpoolRun(run_id) if run is None else SpoolRun.of(run)
        return SpoolKey(of_run, party, round_num, client)

    def draws_in_secret(self, run_id: RunId) -> bool:
        """Return True if the run must not disclose which clients train in its rounds."""
        run = self.state.runs.get(run_id)
        return run is not None and draws_in_secret(run.job)

    def say(self, event: str, run_id: RunId, **ids: Any) -> None:
        """Log an event about one worker of a run; at debug level if clients are drawn in secret."""
        say = log.debug if self.draws_in_secret(run_id) else log.info
        say(event, run_id=run_id, **ids)

    async def report(self, run_id: RunId, fact: Fact, histories: Sequence[HistoryRow] = ()) -> bool:
        """Submit a fact to the loop; return False, and log the reason, if the fact came too late.

        histories: rows to store with the fact, of the steps that the fact ends.
        """
        try:
            await self.loop.submit(Report(run_id, fact), histories)
        except StaleError as error:
            kind, reason = type(fact).__name__, str(error)
            self.say("stale", run_id, kind=kind, reason=reason)
            return False
        return True


# ---- Calls to workers ----


@dataclass(frozen=True, slots=True)
class WorkerCalls:
    """The links to workers, and the requests that go over them."""

    runs: LiveRuns
    links: Links
    yield_slots: Callable[[Effect], None]
    """Releases the compute slots of an effect that continues without them."""
    job_texts: dict[tuple[RunId, Party], tuple[JobSpec, str]] = field(default_factory=dict)

    def link(self, member: Member) -> WorkerLink:
        """Return the link to a worker process, at the newest address of the worker."""
        return self.links.to(member, self.runs.state)

    def job_json(self, run_id: RunId, party: Party) -> str:
        """Return the party's job as JSON, cached: a federated run asks for it once per client."""
        job = self.runs.job_of(run_id, party)
        cached = self.job_texts.get((run_id, party))
        if cached is None or cached[0] is not job:
            cached = self.job_texts[run_id, party] = (job, job.canonical_json())
        return cached[1]

    def submitter(self, run_id: RunId) -> str:
        """Return the name of the user who submitted a run, for requests to workers."""
        return self.runs.state.runs[run_id].submitted_by.replace(" ", "/", 1)

    def request(
        self, party: Party, at: WorkerSession, segment: int, **plan: Message
    ) -> worker_pb2.ExecuteRequest:
        """Return the request that has a worker execute a plan for a party's job. plan: one keyword,
        such as build=BuildPlan()."""
        return worker_pb2.ExecuteRequest(
            fence=self.link(at.member).fence(at.membership),
            session=at.ref,
            segment=segment,
            job_json=self.job_json(at.run_id, party),
            numerics=self.runs.numerics_of(at.run_id),
            known_rows=self._rows_of(at.run_id, party),
            submitted_by=self.submitter(at.run_id),
            **plan,  # type: ignore[arg-type]
        )

    async def lose(self, member: Member, reason: str, *, had_begun: bool) -> None:
        """Report a worker as lost, because no process answers at its address. had_begun: the last
        plan sent to the worker had begun."""
        await self.runs.loop.submit(LoseWorker(member, reason, is_blameless=not had_begun))

    async def end_early(
        self, run_id: RunId, member: Member, result: worker_pb2.ExecuteResult
    ) -> None:
        """Handle a plan without result or error: its worker is draining, or it was aborted."""
        reason = result.interrupted.reason
        self.runs.say("plan interrupted", run_id, worker_id=member.worker_id, reason=reason)
        if reason == "drained":
            await self.runs.loop.submit(DrainWorker(member))

    def forget(self, run_id: RunId) -> None:
        """Forget the cached jobs of a run that has ended."""
        for run_party in [text for text in self.job_texts if text[0] == run_id]:
            del self.job_texts[run_party]

    def _rows_of(self, run_id: RunId, party: Party) -> str:
        """Return the sample rows recorded when the party's model was built, or those of its nearest
        parent party that has any."""
        rows = self.runs.state.runs[run_id].rows
        while party not in rows and party != ROOT:
            party = Party(party.rpartition("/")[0])
        return rows.get(party, "")


# ---- Transfers ----

MAX_PULLS = 2
"""The most model-sized streams received at once: more are not faster, and each takes buffers."""

MAX_HEADERS = 64

MAX_BROUGHT = 16
"""The most states per run that a worker keeps; its requests say which ones it still has."""

PushKey = tuple[Member, RunId, Digest]


@dataclass(frozen=True, slots=True)
class PulledSnapshot:
    """A snapshot of a session that was stored as a blob, with the name that the worker gave the
    snapshot."""

    member: Member
    name: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class Transfers:
    """The stores, and the transfers of states and updates between them and workers."""

    workers: WorkerCalls
    blobs: BlobStore
    spool: Spool
    settings: Settings
    pushes: dict[PushKey, asyncio.Task[None]] = field(default_factory=dict)
    brought: dict[tuple[Member, RunId], deque[Digest]] = field(default_factory=dict)
    """The newest states sent to each member, per run; the member may have dropped some."""
    frames: WeakValueDictionary[Digest, SharedFrames] = field(default_factory=WeakValueDictionary)
    headers: dict[Digest, tuple[Manifest, int]] = field(default_factory=dict)
    pulls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_PULLS))
    snapshots: dict[tuple[RunId, Party], PulledSnapshot] = field(default_factory=dict)
    """The newest pulled snapshot, keyed by run and party."""
    together: Together = field(default_factory=Together)
    """Groups the updates of a round that are being made durable at the same time."""

    @property
    def limits(self) -> Limits:
        """Return the limits of states and updates that come from workers."""
        return Limits(max_total_bytes=self.settings.max_state_bytes)

    async def header(self, digest: Digest) -> tuple[Manifest, int]:
        """Return a blob's manifest, verified against the digest, and the offset of its data."""
        if digest not in self.headers:
            header = await asyncio.to_thread(self._read_header, digest)
            self.keep_header(digest, header)
        return self.headers[digest]

    def keep_header(self, digest: Digest, header: tuple[Manifest, int]) -> None:
        """Cache what `header` returns, for a blob that was just read or written."""
        while len(self.headers) >= MAX_HEADERS:
            self.headers.pop(next(iter(self.headers)))
        self.headers[digest] = header

    async def bring(self, member: Member, run_id: RunId, digest: Digest) -> None:
        """Send a state to a worker before it asks, unless it was sent already."""
        if digest not in self.brought.get((member, run_id), ()):
            await self.push(member, run_id, digest)

    def forget(self, run_id: RunId) -> None:
        """Cancel the transfers of an ended run, and forget which states its workers have."""
        for key in [key for key in self.pushes if key[1] == run_id]:
            self.pushes[key].cancel()
        for member_run in [pair for pair in self.brought if pair[1] == run_id]:
            del self.brought[member_run]
        for run_party in [pair for pair in self.snapshots if pair[0] == run_id]:
            del self.snapshots[run_party]

    def forget_member(self, member: Member) -> None:
        """Forget which states were sent to a worker process that is gone."""
        for member_run in [pair for pair in self.brought if pair[0] == member]:
            del self.brought[member_run]

    async def push(self, member: Member, run_id: RunId, digest: Digest) -> None:
        """Send a blob to a worker; concurrent callers for the same blob share one transfer. Raises
        UnavailableError if the transfer is cancelled: a task group would take a CancelledError for
        the caller's own, and the worker would wait forever."""
        try:
            # One caller that goes away must not take the blob from the others.
            await asyncio.shield(self.start_push(member, run_id, digest))
        except asyncio.CancelledError:
            stop_if_cancelled()
            worker_id = member.worker_id
            raise UnavailableError(f"the transfer to worker {worker_id} was stopped") from None

    def start_push(self, member: Member, run_id: RunId, digest: Digest) -> asyncio.Task[None]:
        """Return the task that sends a blob to a worker, started now unless it runs already."""
        key = (member, run_id, digest)
        task = self.pushes.get(key)
        # One that has ended answers nobody who asks now; one that `forget` stops brings nothing.
        if task is None or task.done() or task.cancelling():
            task = self.pushes[key] = asyncio.create_task(self._push(*key))
            task.add_done_callback(lambda done: self._pushed(key, done))
        return task

    def _pushed(self, key: PushKey, task: asyncio.Task[None]) -> None:
        if self.pushes.get(key) is task:
            del self.pushes[key]
        error = None if task.cancelled() else task.exception()
        if error is not None:  # no task may be left to see it
            worker_id = key[0].worker_id
            self.workers.runs.say(
                "blob not brought", key[1], worker_id=worker_id, reason=told(error)
            )

    async def _push(self, member: Member, run_id: RunId, digest: Digest) -> None:
        if not await self._is_fetched(member, run_id, digest):
            await self._send(member, run_id, digest)
        brought = self.brought.setdefault((member, run_id), deque(maxlen=MAX_BROUGHT))
        if digest in brought:
            brought.remove(digest)
        brought.append(digest)

    async def _is_fetched(self, member: Member, run_id: RunId, digest: Digest) -> bool:
        """Have a worker read a state from the object store by itself; return False if the state
        must be sent."""
        blobs, runs = self.blobs, self.workers.runs
        record = runs.state.workers.get(member.worker_id)
        if not isinstance(blobs, LeafBlobs) or blobs.signs is None or record is None:
            return False
        if not record.capability.takes_signed_requests:
            return False
        if not await asyncio.to_thread(blobs.is_in_leaves, digest):
            return False
        link, stall_s = self.workers.link(member), 4 * self.settings.stream_idle_timeout_s
        try:
            await fetch(link.stub, link.fence(0), run_id, digest, blobs, stall_s)
        except StratagemError as error:
            worker_id, reason = member.worker_id, str(error)
            runs.say("a state is relayed", run_id, worker_id=worker_id, reason=reason)
            return False
        return True

    async def _send(self, member: Member, run_id: RunId, digest: Digest) -> None:
        link = self.workers.link(member)
        manifest, _ = await self.header(digest)
        manifest = replace(manifest, digest=digest)
        header = worker_pb2.SetStateRequest(
            header=worker_pb2.SetStateHeader(
                fence=link.fence(0), run_id=run_id, digest=digest, manifest=to_proto(manifest)
            )
        )
        failpoint("coordinator.push.begun")
        shared = self.frames.get(digest)
        if shared is None:
            file = await asyncio.to_thread(self.blobs.open, digest)
            with file:
                made = SharedFrames(file.source(), manifest.total_bytes, file.check, file.offer)
            shared = self.frames.setdefault(digest, made)
        if link.is_near and (offer := shared.offer()) is not None:
            header.header.file.CopyFrom(offer)
        await push_frames(link.stub.SetState, header, manifest, shared)

    def _read_header(self, digest: Digest) -> tuple[Manifest, int]:
        with self.blobs.open(digest) as file:
            manifest, start = header_of(file, digest)
            return replace(manifest, is_in_leaves=file.is_in_leaves), start


@dataclass(frozen=True, slots=True)
class EffectContext:
    """The three parts that effects act with: runs, worker calls and transfers."""

    runs: LiveRuns
    workers: WorkerCalls
    transfers: Transfers

    def forget(self, run_id: RunId) -> None:
        """Forget a run that has ended, and cancel its transfers."""
        self.runs.errors.forget(run_id)
        self.workers.forget(run_id)
        self.transfers.forget(run_id)


# ---- Signed reads ----
#
# A worker can read a state in leaves from an object store directly. It gets the list of the
# state, asks for leaves, receives signed requests, and reports when it has them all. The bytes do
# not pass through the coordinator.

_PART_BYTES: Final = 2**20


async def fetch(
    stub: Any,
    fence: types_pb2.Fence,
    run_id: str,
    digest: Digest,
    leaves: LeafBlobs,
    stall_s: float,
) -> None:
    """Have a worker read a state from the object store; return once the worker has all of it.
    Raises a StratagemError if that fails: the state must then be sent to the worker."""
    held = await asyncio.to_thread(leaves.open, digest)  # no leaf is collected meanwhile
    content = await asyncio.to_thread(leaves.list_of, digest)
    digests = read_list(content, digest, leaves.limits).digests
    header = worker_pb2.FetchStateHeader(
        fence=fence, run_id=run_id, digest=digest, list_bytes=len(content)
    )
    call = stub.FetchState()
    try:
        async with StallTimeout(stall_s) as peer:
            await call.wait_for_connection()
            await write_message(call, worker_pb2.FetchStateRequest(header=header))
            await _send_list(call, content)
            assert leaves.signs is not None
            signing = LeafSigning(call, worker_pb2.FetchStateRequest, leaves.signs.signed_gets)
            while True:
                with peer.waiting():
                    message = await call.read()
                if message is grpc.aio.EOF:
                    code = await call.code()
                    raise UnavailableError(f"{code.name}: {await call.details()}")
                if message.committed:
                    return
                numbers = [leaf.number for leaf in message.asked.leaves]
                if any(number >= len(digests) for number in numbers):
                    raise InvalidInputError.at("asked.leaves", f"the state has {len(digests)}")
                await signing.answer(numbers, [digests[number] for number in numbers])
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except TimeoutError as error:
        raise UnavailableError(str(error)) from error
    finally:
        call.cancel()
        held.close()


async def _send_list(call: Any, content: bytes) -> None:
    for start in range(0, len(content), _PART_BYTES):
        part = content[start : start + _PART_BYTES]
        await write_message(call, worker_pb2.FetchStateRequest(list=part))


# ---- Signing ----
#
# Within one call, a worker asks for signed requests about the leaves of one state.

MAX_SIGNED: Final = 16
"""The most signed requests per leaf; another one is signed if the last was refused or expired."""

Sign = Callable[[Sequence[Digest]], Sequence[str]]
"""Makes a signed URL for each leaf; blocks."""


class LeafSigning:
    """Answers the requests for signed URLs that a worker makes within one call, up to a limit."""

    def __init__(self, call: Any, make: Callable[..., Any], sign: Sign) -> None:
        """make: the constructor of the call's message with the URLs in its field `signed`."""
        self._call, self._make, self._sign = call, make, sign
        self._signed: Counter[int] = Counter()

    async def answer(self, numbers: Sequence[int], leaves: Sequence[Digest]) -> None:
        """Send a signed URL for each leaf asked for. Raises LimitError for too many. numbers: the
        leaves' numbers, which the caller has checked."""
        self._signed.update(numbers)
        if len(numbers) > MAX_ASKED or any(self._signed[number] > MAX_SIGNED for number in numbers):
            text = f"at most {MAX_ASKED} leaves in a message, and each {MAX_SIGNED} times"
            raise LimitError(f"asked.leaves: {text}")
        urls = await asyncio.to_thread(self._sign, leaves)
        pairs = zip(numbers, urls, strict=True)
        requests = [worker_pb2.SignedRequest(number=number, url=url) for number, url in pairs]
        signed = worker_pb2.SignedRequests(requests=requests)
        await write_message(self._call, self._make(signed=signed))
