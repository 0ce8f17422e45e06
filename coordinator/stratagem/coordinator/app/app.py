"""The coordinator process, assembled from its stores, loop, effects, leases and barriers.

App owns the life of the process: take the lead, replay, serve, and end when the lead is lost.
`_changed` acts on a batch of facts: events for those who watch, links to drop, files to delete.
"""

import asyncio
import os
import time
from collections.abc import Iterable, Set
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from stratagem.common.base.errors import StratagemError
from stratagem.common.base.ids import Party, RunId, is_within
from stratagem.common.numerics.verification import VERIFIER
from stratagem.common.observe.logs import identify
from stratagem.common.privacy.noise import PrivacySecret
from stratagem.common.process.failpoints import failpoint
from stratagem.common.process.process import give_back
from stratagem.common.rpc.channel import Proof
from stratagem.common.tensors.stream import stream_bytes
from stratagem.coordinator.app.keeping import Collector, House, KeptBlobs
from stratagem.coordinator.app.perform import give_up, perform
from stratagem.coordinator.app.plugins import installed
from stratagem.coordinator.app.storage import Storage, tls_of
from stratagem.coordinator.core.apply import CLUSTER
from stratagem.coordinator.core.commands import DrainWorker, EventSpan, LoseWorker
from stratagem.coordinator.core.effects import Effect
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.core.facts import (
    Fact,
    Member,
    RoundClosed,
    RunDeleted,
    RunResumed,
    RunSubmitted,
    SegmentFinished,
    UpdateRejected,
    WorkerLeft,
    WorkerLost,
    WorkerRegistered,
)
from stratagem.coordinator.core.pending import pending, pending_of
from stratagem.coordinator.core.run_view import phase_of, phase_then
from stratagem.coordinator.core.state import EndedRun, RunRecord
from stratagem.coordinator.core.strategy_calls import SHOWN, hides_draws, parties_of, without_draws
from stratagem.coordinator.core.world import WorkerRecord
from stratagem.coordinator.effects.context import (
    EffectContext,
    LiveRuns,
    Transfers,
    WorkerCalls,
)
from stratagem.coordinator.observe.feed import (
    Feed,
    FeedEvent,
    Paces,
    publish_counts,
    say_what_fails,
    say_what_is_missing,
)
from stratagem.coordinator.observe.history import LiveHistory
from stratagem.coordinator.observe.logs import RunLogLine, RunLogs
from stratagem.coordinator.observe.profiles import Profiles
from stratagem.coordinator.observe.troubles import Refusals
from stratagem.coordinator.runtime.leader_gate import LeaderGate
from stratagem.coordinator.runtime.leases import HeartbeatStreams, Leases, PaceRule
from stratagem.coordinator.runtime.links import Links, is_alive
from stratagem.coordinator.runtime.loop import Loop
from stratagem.coordinator.runtime.memory import rest
from stratagem.coordinator.runtime.relay import RelayHub
from stratagem.coordinator.runtime.rendezvous import Barriers
from stratagem.coordinator.runtime.settings import Settings
from stratagem.coordinator.runtime.supervisor import Chores, RunSupervisor
from stratagem.coordinator.store.database import SCHEME
from stratagem.coordinator.store.fact_log import Committed, Recorded
from stratagem.coordinator.store.journal import Journal
from stratagem.coordinator.store.lead import Holder, Lead
from stratagem.coordinator.store.leaves import LeafBlobs

# ---- Process ----

log = structlog.get_logger()


class App:
    def __init__(
        self,
        settings: Settings,
        loop: Loop,
        storage: Storage,
        entrance: LeaderGate,
        refusals: Refusals,
    ) -> None:
        data = settings.data_dir
        self.refusals = refusals
        refusals.on_change = lambda: self._say_missing({CLUSTER})
        self.entrance = entrance
        self.settings = settings
        self.loop = loop
        self.feed = Feed(self._history)
        self.feed.listeners.append(self._look_at)
        self.paces = Paces()
        self.history = LiveHistory()
        self.logs = RunLogs(data / "logs")
        self.profiles = Profiles(data / "profiles")
        self.blobs = storage.blobs(loop.term)
        self.kept = KeptBlobs(self.blobs)
        self.spool = storage.spool(loop.term, self.blobs.make_room)
        self.relay = RelayHub(
            lambda member: is_alive(member, loop.state), is_on=settings.relay == "on"
        )
        self.links = Links(loop.term, self.relay, Proof(tls_of(settings)))
        self.leases = Leases(
            PaceRule(settings.heartbeat_interval_s, settings.worker_ttl_s),
            loop.clock.now,
            self._lose,
            lambda member: self.heartbeats.end(member),
        )
        self.heartbeats = HeartbeatStreams(
            self.leases, loop.term, self.is_over, self._is_known, self._drain
        )
        self.barriers = Barriers(self._membership)
        self.supervisor = RunSupervisor(
            lambda effect: perform(self.env, effect),
            lambda effect, tries: give_up(self.env, effect, tries),
            lambda effect, tries: say_what_fails(self.feed, loop.state, effect, tries),
        )
        self._chores = Chores()
        runs = LiveRuns(
            *(loop, self.feed, self.history, self.logs, self.profiles),
            secret=_secret(settings),
            chores=self._chores,
        )
        workers = WorkerCalls(runs, self.links, self.supervisor.yield_slots)
        transfers = Transfers(workers, self.blobs, self.spool, settings)
        self.env = EffectContext(runs, workers, transfers)
        self.collector = Collector(
            loop, self.blobs, self.spool, self.feed, self._chores, data / "backups"
        )
        self.backups = self.collector.backups
        self._house = House(loop, settings, self.logs, self.profiles, refusals)

    @classmethod
    async def lead(
        cls, settings: Settings, entrance: LeaderGate, refusals: Refusals | None = None
    ) -> "App":
        """Acquire the lead of the journal, waiting for it if need be, and rebuild the state.

        refusals: the registrations of workers that the server has refused.
        """
        await asyncio.to_thread(settings.data_dir.mkdir, 0o700, parents=True, exist_ok=True)
        storage = await asyncio.to_thread(Storage.open, settings)
        strategies = await asyncio.to_thread(installed)
        journal, lead = await asyncio.to_thread(_take_lead, settings, entrance)
        entrance.say("has the lead and reads its journal")
        try:
            identity = await asyncio.to_thread(journal.identity, lead.term)
            await asyncio.to_thread(storage.claim, identity)
        except StratagemError:
            await asyncio.to_thread(journal.release, lead.term)
            raise
        loop = Loop(journal, lead, strategies)
        app = cls(settings, loop, storage, entrance, refusals or Refusals())
        await loop.renew()  # the stores were opened while this coordinator led
        await loop.replay(app._show, renew_every_s=settings.lease_ttl_s / 3)
        app._forget_resting(loop.state.ended)
        failpoint("coordinator.replay.done")
        return app

    async def run(self) -> None:
        """Decide, act and watch the leases until cancelled. Raises if the lead is lost."""
        workers = self.loop.state.workers.values()
        alive = [worker.member for worker in workers if worker.is_alive]
        self.leases.grant(alive, self.leases.rule.of(len(alive)).ttl_s)
        self.supervisor.reconcile(pending(self.loop.state))
        self.collector.begin()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.loop.clock.run())
                group.create_task(self.loop.run(self._changed))
                group.create_task(self._keep_lead())
                group.create_task(self.leases.expire())
                group.create_task(self._house.keep())
                group.create_task(self.collector.keep_room())
                group.create_task(rest(lambda: sum(stream_bytes().values()), give_back))
        finally:
            self.barriers.close()
            await self.supervisor.close()
            await self._chores.close()
            await self.kept.close()
            await self.links.close()
            await self.heartbeats.close()
            await self.relay.close()
            self.logs.close()

    @property
    def store_id(self) -> str:
        """Return the id of the folder of states that workers may write to; "" if there is none."""
        blobs = self.blobs
        return blobs.store_id if isinstance(blobs, LeafBlobs) and blobs.writes_leaves else ""

    def is_over(self, run_id: RunId) -> bool:
        """Return True if the run has ended or is unknown."""
        run = self.loop.state.runs.get(run_id)
        return run is None or run.ended is not None

    def silent_s(self, worker: WorkerRecord) -> float:
        """Return the seconds since a worker was last heard from, by the leader's clock."""
        if not worker.is_alive:
            return max(0.0, self.loop.clock.now() - worker.beat_s)
        return self.leases.silent_s(worker.member) or 0.0

    # ---- consequences of facts ----

    def _changed(self, facts: list[Committed]) -> None:
        """Act on a batch of facts, journaled and folded into the state; called once per batch."""
        self._show(facts)
        changed = {item.entry.run_id for item in facts}
        visible_runs = {item.entry.run_id for item in facts if item.shown_index >= 0}
        self._say_missing(visible_runs)
        for item in facts:
            self._follow(item.entry.run_id, item.entry.fact, item.shown_index)
        publish_counts(self.feed, self.loop.state, self.loop.world, visible_runs)
        for run_id in changed:
            self._end_of(run_id)
            self._look_at(run_id, has_facts=True)
        self.barriers.drop_stale()
        if CLUSTER in changed:
            for link in self.links.drop_lost(self.loop.state):
                self._chores.do(link.close(), f"close the link to {link.member.worker_id}")
            if self.loop.cluster_is_long:
                self._chores.do(self.loop.sum_up_cluster(), "sum up the facts of the cluster")
        runs = self.loop.state.runs
        self._forget_resting(changed & self.loop.state.ended.keys())
        due = (pending_of(runs[run_id]) for run_id in changed if run_id in runs)
        self.supervisor.reconcile(frozenset[Effect]().union(*due), changed)

    def _say_missing(self, changed: Set[RunId]) -> None:
        asked = self.refusals.sentence()
        say_what_is_missing(self.feed, self.loop.state, self.loop.world, changed, asked)

    def _show(self, facts: list[Committed]) -> None:
        """Publish facts as events; only a run's newest event carries its present phase."""
        for item in facts:
            run_id = item.entry.run_id
            run = self.loop.state.find(run_id)
            if run is None:
                self.feed.forget(run_id)
                continue
            if item.shown_index < 0:
                continue
            is_last = item.shown_index == run.num_shown - 1 and self.is_over(run_id)
            self.feed.add_event(run_id, self._event(run, item), is_last=is_last)

    def _look_at(self, run_id: RunId, *, has_facts: bool = False) -> None:
        """Update the measured pace of a run, or drop it if the run has ended."""
        run = self.loop.state.runs.get(run_id)
        if run is None or run.ended is not None:
            self.paces.forget(run_id)
        else:
            progress = self.feed.progress(run_id)
            self.paces.look(self.loop.world, run, progress, anew=has_facts)

    def _forget_resting(self, run_ids: Iterable[RunId]) -> None:
        """Drop archived runs from the feed: queries about them are answered from the journal."""
        for run_id in run_ids:
            self.feed.forget(run_id)

    async def _history(self, run_id: RunId, span: EventSpan, num_events: int) -> list[FeedEvent]:
        """Return the first stored events of a span (a range of indexes), at most num_events."""
        run = self.loop.state.find(run_id)
        if run is not None and hides_draws(run):
            facts = await shown_facts(self.loop.recorded, run_id, span, num_events)
        else:
            read = await self.loop.recorded.read(run_id, span, num_events)
            facts = [replace(item, shown_index=item.index) for item in read]
        run = self.loop.state.find(run_id)
        if run is None:
            return []
        return [self._event(run, item) for item in facts if item.shown_index < run.num_shown]

    def _event(self, run: RunRecord | EndedRun, item: Committed) -> FeedEvent:
        index, fact = item.shown_index, item.entry.fact
        phase = phase_of(self.loop.world, run) if index == run.num_shown - 1 else phase_then(fact)
        public_fact = without_draws(run, fact)
        payload = item.payload if public_fact is fact else ""
        return FeedEvent(index, item.wall_s, public_fact, phase, item.time_s, payload)

    def _follow(self, run_id: RunId, fact: Fact, shown_index: int) -> None:
        if isinstance(fact, RunSubmitted):
            self._forget_lines(run_id)  # a crash may have left those of an earlier run of that id
        if run_id != CLUSTER and not isinstance(fact, RunDeleted) and shown_index >= 0:
            text = sentence(without_draws(self.loop.state.find(run_id), fact))
            self.logs.add(run_id, RunLogLine(time.time(), "", "INFO", text))
        self.collector.follow(run_id, fact)
        match fact:
            case WorkerRegistered():
                self.leases.grant([fact.member], self.leases.rule.ttl_s)
                self.relay.forget_others(fact.member)
                self.refusals.forget(fact.member.worker_id)
            case WorkerLost() | WorkerLeft():
                self.leases.drop(fact.member)
                self.env.transfers.forget_member(fact.member)
                self.relay.forget(fact.member)
            case SegmentFinished():
                if not is_within(fact.party, VERIFIER):
                    self.feed.set_progress(run_id, None)
                self.history.end(run_id, fact.party)
            case RunResumed():  # which may have trained until now
                self.feed.set_progress(run_id, None)
                self.history.forget(run_id)
            case RoundClosed() if not is_within(fact.party, VERIFIER):
                self.feed.set_progress(run_id, None)
            case UpdateRejected():
                self.env.runs.refused[fact.cause] += 1
            case RunDeleted():
                self.feed.forget(run_id)
                self._forget_lines(run_id)

    def _end_of(self, run_id: RunId) -> None:
        """Release the streams, files and memory of a run, if the run has ended."""
        if run_id != CLUSTER and self.is_over(run_id):
            self.heartbeats.tell_released(run_id)
            self.logs.close_run(run_id)
            self.history.forget(run_id)
            merging = self._house.merge_history(run_id)
            self._chores.do(merging, f"merge the step history of run {run_id}")

    def _forget_lines(self, run_id: RunId) -> None:
        self.logs.delete(run_id)
        self.profiles.delete(run_id)

    # ---- questions of others ----

    def _is_known(self, run_id: RunId) -> bool:
        return self.loop.state.find(run_id) is not None

    async def _lose(self, member: Member, reason: str, silent_s: float) -> None:
        await self.loop.submit(LoseWorker(member, reason, silent_s=silent_s))

    async def _drain(self, member: Member) -> None:
        await self.loop.submit(DrainWorker(member))

    def _membership(self, run_id: RunId, party: Party) -> tuple[int, int] | None:
        run = self.loop.state.runs.get(run_id)
        if run is None:
            return None
        view = parties_of(run).get(party)
        return None if view is None else (view.membership, len(view.members))

    async def _keep_lead(self) -> None:
        """Renew the lease periodically. Raises if another coordinator has taken the lead meanwhile.

        While the journal cannot be reached another coordinator may lead, so no call is answered.
        """
        third_s = self.settings.lease_ttl_s / 3
        while True:
            await asyncio.sleep(third_s)
            renewing = asyncio.create_task(self.loop.renew())
            try:
                async with asyncio.timeout(third_s):
                    await asyncio.shield(renewing)
            except TimeoutError:
                self.leases.suspend()
                await self.entrance.shut("cannot reach its journal and may no longer lead")
                self.heartbeats.end_all(self.entrance.refusal())
                await renewing
                await self.entrance.open()
                self.leases.resume()


def _secret(settings: Settings) -> PrivacySecret:
    """Return the secret of private runs, from the given file or from one beside a local journal."""
    if settings.privacy_secret is not None:
        return PrivacySecret(settings.privacy_secret)
    if settings.journal.startswith(f"{SCHEME}://"):
        return PrivacySecret(None)
    journal = Path(settings.journal or settings.data_dir / "journal.sqlite")
    return PrivacySecret(journal.with_name("privacy-secret"), may_make=True)


def _take_lead(settings: Settings, entrance: LeaderGate) -> tuple[Journal, Lead]:
    place = settings.journal or settings.data_dir / "journal.sqlite"
    journal = Journal.open(place, password_file=settings.journal_password_file)
    holder = Holder.of_this_process(settings.name, entrance.address)
    lead = journal.take_lead(holder, ttl_s=settings.lease_ttl_s, on_wait=entrance.note_leader)
    identify(term=lead.term)
    log.info("taken the lead", pid=os.getpid())
    return journal, lead


# ---- Facts of secret draws ----
#
# A reader of a run whose clients are drawn in secret gets its facts renumbered, without the hidden
# ones.

PAGE_FACTS: Final = 256


async def shown_facts(
    recorded: Recorded, run_id: RunId, span: EventSpan, num_facts: int
) -> list[Committed]:
    """Return the first facts, at most num_facts, in a span of a run whose clients are sampled in
    secret. The span counts only facts that readers get. A run has about four of them per round, so
    all those before the span are read, too."""
    facts: list[Committed] = []
    remainder, number = EventSpan(kinds=SHOWN), 0
    while page := await recorded.read(run_id, remainder, PAGE_FACTS):
        for item in page:
            if number == span.before_index or (len(facts) == num_facts and not span.newest_first):
                return facts[::-1][:num_facts] if span.newest_first else facts
            if number >= span.from_index and span.wants(type(item.entry.fact).__name__):
                facts.append(replace(item, shown_index=number))
            number += 1
        remainder = remainder.after(page[-1].index)
    return facts[::-1][:num_facts] if span.newest_first else facts
