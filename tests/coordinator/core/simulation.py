"""A cluster in which everything that is asked for happens, to test the pure core without one."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stratagem.common.base.ids import Digest, Incarnation, RunId, WorkerId
from stratagem.common.numerics.numerics_rules import CURRENT
from stratagem.coordinator.core.commands import (
    Command,
    Ending,
    JournalEntry,
    Refusal,
    RegisterWorker,
    Report,
    SubmitRun,
)
from stratagem.coordinator.core.effects import (
    AccountRound,
    AggregateRound,
    Build,
    CollectUpdate,
    CommitSegment,
    Effect,
    EvaluateState,
    JudgeUpdates,
    MergeMetrics,
    PostKeys,
    Release,
    RouteShares,
    RowsAsked,
    RunSegment,
    SumRegion,
    TrainClient,
    UploadCommit,
)
from stratagem.coordinator.core.facts import (
    SKIPPED_STEPS,
    Capability,
    ClientEvaluated,
    CommitUploaded,
    Evaluated,
    Fact,
    KeysPosted,
    Member,
    MetricsMerged,
    ModelBuilt,
    RoundAccounted,
    RowsSpent,
    RunReleased,
    SegmentCommitted,
    SegmentFinished,
    SharesRouted,
    UpdateReceived,
    UpdatesJudged,
)
from stratagem.coordinator.core.facts.fact_serialization import decode, encode
from stratagem.coordinator.core.state import CoordinatorState, RunPhase
from stratagem.coordinator.core.state_machine.agenda import Agenda
from stratagem.coordinator.core.state_machine.apply import apply
from stratagem.coordinator.core.state_machine.decide import decide, world_of
from stratagem.coordinator.core.state_machine.pending_effects import pending
from stratagem.coordinator.core.strategy_table import Strategies
from stratagem.coordinator.runtime.plugins import BUILT_IN
from tests.coordinator.core.ask_every_run import next_deadline, settle

F = TypeVar("F", bound=Fact)

RUN = RunId("run-1")
ROWS = {"train": 100, "test": 20}


def digest(name: str) -> Digest:
    return Digest(name.encode().hex().ljust(64, "0")[:64])


def member(name: str, start: int = 0) -> Member:
    return Member(worker_id=WorkerId(name), incarnation=Incarnation(f"{name}-{start}"))


def register(
    name: str, start: int = 0, ending: Ending | None = None, **capability: Any
) -> RegisterWorker:
    return RegisterWorker(
        member(name, start),
        f"127.0.0.1:{5000 + start}",
        Capability.model_validate(
            {"numerics_fingerprint": "same", "numerics_rules": CURRENT} | capability
        ),
        ending,
    )


def ending(name: str, start: int, **known: Any) -> Ending:
    """What the next process of a worker tells of how this one has ended."""
    return Ending(member(name, start).incarnation, **known)


@dataclass
class Simulation:
    """The journal, the state that it folds to, and what is under way."""

    strategies: Strategies = BUILT_IN
    """Of the process, from its start on."""
    state: CoordinatorState = field(init=False)
    journal: list[tuple[RunId, str, str, float]] = field(default_factory=list)
    queue: deque[Report] = field(default_factory=deque)
    seen: set[Effect] = field(default_factory=set)
    now_s: float = 0.0
    agenda: Agenda = field(init=False)
    structural: tuple[str, ...] = ()
    """What workers find out when they build a model."""
    keys: set[tuple[RunId, str]] = field(default_factory=set)
    """Of the facts so far that must not happen twice."""

    def __post_init__(self) -> None:
        self.state = CoordinatorState(self.strategies)
        self.agenda = Agenda(self.state)

    def tell(self, command: Command) -> Refusal | tuple[JournalEntry, ...]:
        """Decide, journal and apply one command, and start what it made due."""
        decision = decide(self.state, command)
        if isinstance(decision, Refusal):
            return decision
        for entry in decision:
            self._add(entry)
        expected = list(settle(self.state, self.now_s))
        followed: list[JournalEntry] = []

        def add(entry: JournalEntry) -> CoordinatorState:
            followed.append(entry)
            return self._add(entry)

        self.agenda.settle(self.state, self.now_s, add)
        assert followed == expected, "the agenda has forgotten to ask a run, or asks in other order"
        assert self.agenda.world.usable() == world_of(self.state).usable()
        assert self.agenda.next_deadline == next_deadline(self.state)
        self._start()
        return decision

    def run(self, limit: int = 10_000) -> None:
        """Let everything happen that is under way."""
        for _ in range(limit):
            if not self.queue:
                return
            self.tell(self.queue.popleft())
        raise AssertionError("the simulation does not end")

    def crash(self) -> None:
        """Forget all but the journal; the next process has `strategies`."""
        self.state = CoordinatorState(self.strategies)
        self.queue.clear()
        self.seen.clear()
        for run_id, kind, payload, time_s in self.journal:
            self.state = apply(self.state, run_id, decode(kind, 1, payload), time_s)
        self.agenda = Agenda(self.state)
        self._start()

    def facts(self, kind: type[F]) -> list[F]:
        """All journaled facts of a kind."""
        decoded = (decode(k, 1, p) for _, k, p, _ in self.journal if k == kind.__name__)
        return [fact for fact in decoded if isinstance(fact, kind)]

    def _add(self, entry: JournalEntry) -> CoordinatorState:
        assert entry.key is None or (entry.run_id, entry.key) not in self.keys, (
            f"the journal refuses a second {entry.key}, and the coordinator ends"
        )
        self.keys.add((entry.run_id, entry.key or ""))
        kind, payload = encode(entry.fact)
        self.journal.append((entry.run_id, kind, payload, self.now_s))
        self.state = apply(self.state, entry.run_id, decode(kind, 1, payload), self.now_s)
        self.agenda.note(self.state, entry.run_id)
        if entry.run_id not in self.state.runs and entry.run_id not in self.state.ended:
            # A run that is deleted takes its rows along; what is of no run has no key.
            self.keys = {key for key in self.keys if key[0] != entry.run_id}
        return self.state

    def _start(self) -> None:
        due = pending(self.state)
        for effect in sorted(due - self.seen, key=repr):
            for fact in do(effect):
                if isinstance(fact, ModelBuilt) and self.structural:
                    fact = fact.model_copy(update={"structural": self.structural})
                self.queue.append(Report(effect.run_id, fact))
        self.seen = set(due)


def _spent(asked: RowsAsked | None) -> RowsSpent | None:
    """Epsilon 1 for each round that a client was asked for."""
    if asked is None:
        return None
    epsilon = float(asked.num_rounds + 1)
    return RowsSpent(epsilon=epsilon, next_epsilon=epsilon + 1, fingerprint="f", accountant="one")


def _kept(effect: RunSegment) -> tuple[Digest, ...]:
    if not effect.keeps:
        return ()
    return tuple(digest(f"{m.worker_id} after {effect.segment}") for m in effect.members)


def do(effect: Effect) -> list[Fact]:
    """The fact that an effect ends with when nothing goes wrong."""
    match effect:
        case Build():
            return [
                ModelBuilt(
                    party=effect.party,
                    digest=digest(f"{effect.party}built"),
                    size_bytes=1,
                    num_rows=ROWS,
                    num_parameters=7,
                    layout_digest="x",
                )
            ]
        case RunSegment():
            return [
                SegmentFinished(
                    party=effect.party,
                    segment=effect.segment,
                    step=effect.to_step,
                    membership=effect.membership,
                    loss=1.0 / effect.segment,
                    num_rows=1,
                    seconds=1.0,
                    engine="solo",
                    streams=f"of {effect.party} after {effect.to_step}",
                    kept=_kept(effect),
                    metrics={
                        SKIPPED_STEPS: effect.num_skipped + 1.0,
                        **({"test.accuracy": effect.to_step / 1000} if effect.evaluate else {}),
                        **_of_train(effect),
                    },
                )
            ]
        case CommitSegment():
            return [
                SegmentCommitted(
                    party=effect.party,
                    segment=effect.segment,
                    step=effect.step,
                    digest=digest(f"{effect.party}segment{effect.segment}"),
                    size_bytes=1,
                    metrics=dict(effect.metrics),
                    streams=effect.streams,
                    is_partial=effect.is_partial,
                )
            ]
        case UploadCommit():
            return [
                CommitUploaded(
                    party=effect.party,
                    segment=effect.segment,
                    digest=digest(f"whole{effect.segment}"),
                    size_bytes=2,
                )
            ]
        case TrainClient():
            return [
                UpdateReceived(
                    party=effect.party,
                    round_num=effect.round_num,
                    client=effect.client,
                    digest=digest(f"update{effect.round_num}/{effect.client}"),
                    num_samples=10 + effect.client,
                    loss=0.5,
                    seconds=1.0,
                    num_steps=3,
                    spent=_spent(effect.rows),
                    client_state=digest(f"state{effect.round_num}/{effect.client}"),
                )
            ]
        case AccountRound():
            rate = 0.5 if len(effect.candidates) > 4 else 1.0
            return [
                RoundAccounted(
                    party=effect.party,
                    round_num=effect.round_num,
                    drawn=effect.candidates[effect.round_num % 2 :: round(1 / rate)],
                    sampling_rate=rate,
                    num_expected=rate * len(effect.candidates),
                    clip_norm=effect.clip_norm,
                    noise_multiplier=effect.noise_multiplier or 2.0,
                    sum_noise=1.0,
                    answer_noise=0.0,
                    epsilon=float(effect.num_spent + 1),
                    delta=1e-5,
                    accountant="none",
                    fingerprint=effect.fingerprint or "f",
                )
            ]
        case CollectUpdate():
            return [
                UpdateReceived(
                    party=effect.party,
                    round_num=effect.round_num,
                    client=effect.client,
                    digest=digest(f"update{effect.round_num}/{effect.client}"),
                    num_samples=effect.num_samples,
                    loss=effect.loss,
                    seconds=0.0,
                    num_steps=effect.num_steps,
                    metrics=dict(effect.metrics),
                    traffic=dict(effect.traffic),
                )
            ]
        case SumRegion():
            return [
                UpdateReceived(
                    party=effect.party,
                    round_num=effect.round_num,
                    client=effect.client,
                    digest=digest(f"sum{effect.round_num}/{effect.client}"),
                    num_samples=sum(each.num_samples for each in effect.accepted),
                    loss=effect.loss,
                    seconds=0.0,
                    num_steps=effect.num_steps,
                    metrics=dict(effect.metrics),
                )
            ]
        case PostKeys():
            return [
                KeysPosted(
                    party=effect.party,
                    round_num=effect.round_num,
                    attempt=effect.clients.attempt,
                    clients=tuple(client for client, _ in effect.clients.workers),
                    directory=digest(f"keys{effect.round_num}/{effect.clients.attempt}"),
                    ring_seed="05" * 32,
                )
            ]
        case RouteShares():
            return [
                SharesRouted(
                    party=effect.party,
                    round_num=effect.round_num,
                    attempt=effect.clients.attempt,
                    clients=tuple(client for client, _ in effect.clients.workers),
                    shares=digest(f"shares{effect.round_num}/{effect.clients.attempt}"),
                )
            ]
        case JudgeUpdates():
            weights = tuple(1.0 for _ in effect.accepted)
            return [
                UpdatesJudged(
                    party=effect.party,
                    round_num=effect.round_num,
                    weights=weights,
                    scores=weights,
                )
            ]
        case AggregateRound():
            return [
                SegmentCommitted(
                    party=effect.party,
                    segment=effect.round_num,
                    step=effect.round_num,
                    digest=digest(f"round{effect.round_num}"),
                    size_bytes=1,
                    metrics=dict(effect.metrics),
                    clip_norm=effect.privacy.clip_norm / 2 if effect.privacy else None,
                )
            ]
        case EvaluateState(client=int(client)):
            sums = {"test/loss": 2.0 * (client + 1), "test/weight:": client + 1.0}
            return [
                ClientEvaluated(
                    party=effect.party, segment=effect.base.segment, client=client, sums=sums
                )
            ]
        case MergeMetrics():
            return [
                MetricsMerged(
                    party=effect.party,
                    segment=effect.segment,
                    clients=tuple(client for client, _ in effect.states),
                    worker_id=effect.member.worker_id,
                    metrics=dict.fromkeys(effect.metrics, 0.25),
                )
            ]
        case EvaluateState():
            metrics = {"test.loss": 0.1}
            return [Evaluated(party=effect.party, segment=effect.base.segment, metrics=metrics)]
        case Release():
            return [RunReleased()]


def _of_train(effect: RunSegment) -> dict[str, float]:
    """The loss of an evaluation of the training rows."""
    return {"train.loss": 9.0 / effect.segment} if "train" in effect.evaluate else {}


def start(
    job_json: str,
    *workers: str,
    structural: tuple[str, ...] = (),
    strategies: Strategies = BUILT_IN,
) -> Simulation:
    """A simulation with workers and one submitted run."""
    simulation = Simulation(strategies, structural=structural)
    for name in workers:
        simulation.tell(register(name))
    simulation.tell(SubmitRun(RUN, job_json, 0.0))
    return simulation


def phase(simulation: Simulation) -> RunPhase:
    run = simulation.state.runs[RUN]
    if run.ended:
        return run.ended
    return run.strategy.status(run.job, run.value, world_of(simulation.state)).phase


def reason(simulation: Simulation) -> str:
    run = simulation.state.runs[RUN]
    return run.strategy.status(run.job, run.value, world_of(simulation.state)).reason
