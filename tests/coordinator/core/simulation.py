"""A cluster in which everything that is asked for happens, to test the pure core without one."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from stratagem.common.base.ids import Digest, Incarnation, RunId, WorkerId
from stratagem.common.numerics.rules import CURRENT
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core import effects as e
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.apply import CLUSTER, apply
from stratagem.coordinator.core.commands import (
    Command,
    Ending,
    JournalEntry,
    LoseWorker,
    Refusal,
    RegisterWorker,
    Report,
    SubmitRun,
    Tick,
)
from stratagem.coordinator.core.decide import Agenda, decide, world_of
from stratagem.coordinator.core.fact_text import decode, encode
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.pending import pending
from stratagem.coordinator.core.persistent import PersistentMap
from stratagem.coordinator.core.state import CoordinatorState, RunRecord
from stratagem.coordinator.core.strategy_contract import Status, Strategies
from stratagem.coordinator.core.world import RunPhase
from tests.coordinator.core.ask_every_run import next_deadline, next_entry
from tests.coordinator.core.jobs import job_text

E = TypeVar("E")
F = TypeVar("F", bound=f.Fact)
RUN = RunId("run-1")
ROWS = {"train": 100, "test": 20}


def digest(name: str) -> Digest:
    return Digest(name.encode().hex().ljust(64, "0")[:64])


def member(name: str, start: int = 0) -> f.Member:
    return f.Member(worker_id=WorkerId(name), incarnation=Incarnation(f"{name}-{start}"))


def register(
    name: str, start: int = 0, ending: Ending | None = None, **capability: Any
) -> RegisterWorker:
    known = {"numerics_fingerprint": "same", "numerics_rules": CURRENT} | capability
    address = f"127.0.0.1:{5000 + start}"
    return RegisterWorker(member(name, start), address, f.Capability.model_validate(known), ending)


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
    seen: set[e.Effect] = field(default_factory=set)
    now_s: float = 0.0
    agenda: Agenda = field(init=False)
    structural: tuple[str, ...] = ()
    """What workers find out when they build a model."""
    keys: set[tuple[RunId, str]] = field(default_factory=set)
    """Of the facts so far that must not happen twice."""
    replayed: tuple[int, CoordinatorState] = field(init=False)
    """So many facts, and the state that a process made of them when it started."""

    def __post_init__(self) -> None:
        self.state = CoordinatorState(self.strategies)
        self.replayed = (0, self.state)
        self.agenda = Agenda(self.state)

    # ---- what happens ----

    def tell(self, command: Command) -> Refusal | tuple[JournalEntry, ...]:
        """Decide, journal and apply one command, and start what it made due."""
        before = self.state
        decision = decide(self.state, command)
        if isinstance(decision, Refusal):
            assert self.state is before
            return decision
        for entry in decision:
            self._add(entry)
        followed = Counter[RunId]()

        def add(entry: JournalEntry) -> CoordinatorState:
            expected = next_entry(self.state, world_of(self.state), self.now_s, followed)
            assert entry == expected, "the agenda asks in other order"
            followed[getattr(entry.fact, "run_id", entry.run_id)] += 1
            return self._add(entry)

        self.agenda.settle(self.state, self.now_s, add)
        world = world_of(self.state)
        left_out = next_entry(self.state, world, self.now_s, followed)
        assert left_out is None, "the agenda has forgotten to ask a run"
        assert self.agenda.world.usable() == world.usable()
        assert self.agenda.next_deadline == next_deadline(self.state, world)
        self._start()
        return decision

    def happen(self, *facts: f.Fact) -> None:
        """Facts of the cluster are journaled, and what follows from them is decided."""
        for fact in facts:
            self._add(JournalEntry(CLUSTER, fact))
        self.tell(Tick())

    def report(self, *facts: f.Fact) -> None:
        """Tell facts of the run, none of which is refused."""
        for fact in facts:
            answer = self.tell(Report(RUN, fact))
            assert not isinstance(answer, Refusal), answer

    def refusal(self, told: Command | f.Fact) -> Refusal:
        """The refusal of a command, or of a fact of the run."""
        answer = self.tell(Report(RUN, told) if isinstance(told, f.Fact) else told)
        assert isinstance(answer, Refusal)
        return answer

    def step(self) -> Refusal | tuple[JournalEntry, ...]:
        """Let the next thing happen that is under way."""
        return self.tell(self.queue.popleft())

    def go_on(self, at_most: int) -> None:
        """Let so many things happen, or all where they are fewer."""
        for _ in range(min(at_most, 10_000)):
            if self.queue:
                self.step()

    def run(self, limit: int = 10_000) -> None:
        """Let everything happen that is under way."""
        self.go_on(limit)
        assert not self.queue, "the simulation does not end"

    def complete(self) -> None:
        """Let everything happen, which ends the run well."""
        self.run()
        assert self.record.ended is RunPhase.COMPLETED, self.record.reason

    def until(self, kind: type[f.Fact], times: int = 1) -> None:
        """Go on until facts of a kind are there."""
        while len(self.facts(kind)) < times:
            self.step()

    def until_due(self, kind: type[e.Effect]) -> None:
        """Go on until an effect of a kind is due."""
        while not self.due(kind):
            self.step()

    def alone(self) -> None:
        """The next thing happens, and all else that is under way is forgotten."""
        self.step()
        self.queue.clear()

    def come(self, names: Iterable[str], start: int = 0, **capability: Any) -> None:
        for name in names:
            self.tell(register(name, start, **capability))

    def crowd(self, names: Sequence[str], **capability: Any) -> None:
        """Workers come at once, with no more work than for one."""
        self.come(names[:1], **capability)
        one = self.state.workers[WorkerId(names[0])]
        workers = {WorkerId(name): replace(one, member=member(name)) for name in names}
        self.state = replace(self.state, workers=PersistentMap({**self.state.workers, **workers}))
        self.agenda = Agenda(self.state)

    def sites(self, names: Iterable[str], start: int = 0, **capability: Any) -> None:
        """Workers come that have rows of their own."""
        self.come(names, start, local_data=("ward",), **capability)

    def lose(self, names: Iterable[str], start: int = 0, reason: str = "killed") -> None:
        for name in names:
            self.tell(LoseWorker(member(name, start), reason))

    def tick(self, now_s: float) -> None:
        """Time has come to this."""
        self.now_s = now_s
        self.tell(Tick())

    def crash(self, *, is_twin: bool = True) -> None:
        """Forget all but the journal, of which the next process, with `strategies`, makes the same
        state unless something else was changed than what the journal says."""
        before = self.state
        self.replayed = (0, CoordinatorState(self.strategies))
        self.restart()
        assert not is_twin or self.state == before, "a replay comes to another state"

    def restart(self) -> None:
        """As a crash, at a run's every fact: what was replayed before is not replayed again."""
        num_facts, self.state = self.replayed
        self.queue.clear()
        self.seen.clear()
        for run_id, kind, payload, time_s in self.journal[num_facts:]:
            self.state = apply(self.state, run_id, decode(kind, 1, payload), time_s)
        self.replayed = (len(self.journal), self.state)
        self.agenda = Agenda(self.state)
        self._start()

    def fork(self) -> Self:
        """Another one that has come as far."""
        other = copy(self)
        other.journal, other.queue = list(self.journal), deque(self.queue)
        other.seen, other.keys = set(self.seen), set(self.keys)
        other.agenda = Agenda(other.state)
        return other

    # ---- how things stand ----

    @property
    def record(self) -> RunRecord:
        """The run."""
        return self.state.runs[RUN]

    @property
    def status(self) -> Status:
        """What the strategy of the run says of it."""
        run = self.record
        return run.strategy.status(run.job, run.value, world_of(self.state))

    @property
    def phase(self) -> RunPhase:
        return self.record.ended or self.status.phase

    @property
    def reason(self) -> str:
        return self.status.reason

    def facts(self, kind: type[F]) -> list[F]:
        """All journaled facts of a kind."""
        decoded = (decode(k, 1, p) for _, k, p, _ in self.journal if k == kind.__name__)
        return [fact for fact in decoded if isinstance(fact, kind)]

    def fact(self, kind: type[F]) -> F:
        """The only one of its kind."""
        (found,) = self.facts(kind)
        return found

    def kinds(self, *kinds: str) -> list[str]:
        """Of all facts in the order of the journal, or of those named."""
        return [kind for _, kind, _, _ in self.journal if not kinds or kind in kinds]

    def due(self, kind: type[E]) -> list[E]:
        """What is to be done, of a kind: by client where clients do it."""
        found = [each for each in pending(self.state) if isinstance(each, kind)]
        return sorted(found, key=lambda each: (getattr(each, "client", None) or 0, repr(each)))

    def due_one(self, kind: type[E]) -> E:
        """The only one of its kind."""
        (found,) = self.due(kind)
        return found

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
            fact = do(effect)
            if isinstance(fact, f.ModelBuilt) and self.structural:
                fact = fact.model_copy(update={"structural": self.structural})
            self.queue.append(Report(effect.run_id, fact))
        self.seen = set(due)


def built(party: str = "", **changes: Any) -> f.ModelBuilt:
    known: dict[str, Any] = {"party": party, "digest": digest(f"{party}built"), "num_rows": ROWS}
    return f.ModelBuilt(
        **known | {"size_bytes": 1, "num_parameters": 7, "layout_digest": "x"} | changes
    )


def finished(segment: int, step: int, membership: int, **changes: Any) -> f.SegmentFinished:
    known: dict[str, Any] = {"party": f.ROOT, "loss": 1.0, "num_rows": 1, "seconds": 1.0}
    known |= {"segment": segment, "step": step, "membership": membership, "engine": "solo"}
    return f.SegmentFinished(**known | {"metrics": {}} | changes)


def committed(segment: int, step: int, name: str, **changes: Any) -> f.SegmentCommitted:
    known: dict[str, Any] = {"party": f.ROOT, "segment": segment, "step": step, "size_bytes": 1}
    return f.SegmentCommitted(**known | {"digest": digest(name), "metrics": {}} | changes)


def _spent(asked: e.RowsAsked | None) -> f.RowsSpent | None:
    """Epsilon 1 for each round that a client was asked for."""
    if asked is None:
        return None
    epsilon = float(asked.num_rounds + 1)
    return f.RowsSpent(epsilon=epsilon, next_epsilon=epsilon + 1, fingerprint="f", accountant="one")


def _trained(effect: e.RunSegment) -> f.SegmentFinished:
    """Of which an evaluation of the training rows has a loss of its own."""
    metrics = {f.SKIPPED_STEPS: effect.num_skipped + 1.0}
    metrics |= {"test.accuracy": effect.to_step / 1000} if effect.evaluate else {}
    metrics |= {"train.loss": 9.0 / effect.segment} if "train" in effect.evaluate else {}
    kept = tuple(digest(f"{m.worker_id} after {effect.segment}") for m in effect.members)
    return finished(
        effect.segment,
        effect.to_step,
        effect.membership,
        party=effect.party,
        loss=1.0 / effect.segment,
        streams=f"of {effect.party} after {effect.to_step}",
        kept=kept if effect.keeps else (),
        metrics=metrics,
    )


def _accounted(effect: e.AccountRound) -> f.RoundAccounted:
    rate = 0.5 if len(effect.candidates) > 4 else 1.0
    return f.RoundAccounted(
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


def _updated(effect: e.TrainClient | e.CollectUpdate | e.SumRegion) -> f.UpdateReceived:
    at = f"{effect.round_num}/{effect.client}"
    of: dict[str, Any] = {"party": effect.party, "round_num": effect.round_num, "seconds": 0.0}
    of |= {"client": effect.client, "digest": digest(f"update{at}")}
    if isinstance(effect, e.TrainClient):
        of |= {"num_samples": 10 + effect.client, "loss": 0.5, "num_steps": 3, "seconds": 1.0}
        return f.UpdateReceived(**of, spent=_spent(effect.rows), client_state=digest(f"state{at}"))
    of |= {"loss": effect.loss, "num_steps": effect.num_steps, "metrics": dict(effect.metrics)}
    if isinstance(effect, e.CollectUpdate):
        return f.UpdateReceived(**of, num_samples=effect.num_samples, traffic=dict(effect.traffic))
    of["digest"] = digest(f"sum{at}")
    return f.UpdateReceived(**of, num_samples=sum(each.num_samples for each in effect.accepted))


def _of_round(effect: e.PostKeys | e.RouteShares | e.JudgeUpdates | e.AggregateRound) -> f.Fact:
    number = effect.round_num
    of: dict[str, Any] = {"party": effect.party, "round_num": number}
    match effect:
        case e.JudgeUpdates():
            weights = tuple(1.0 for _ in effect.accepted)
            return f.UpdatesJudged(**of, weights=weights, scores=weights)
        case e.AggregateRound():
            norm = effect.privacy.clip_norm / 2 if effect.privacy else None
            of = {"party": effect.party, "metrics": dict(effect.metrics), "clip_norm": norm}
            return committed(number, number, f"round{number}", **of)
    at, clients = f"{number}/{effect.clients.attempt}", effect.clients.workers
    of |= {"attempt": effect.clients.attempt, "clients": tuple(client for client, _ in clients)}
    if isinstance(effect, e.RouteShares):
        return f.SharesRouted(**of, shares=digest(f"shares{at}"))
    return f.KeysPosted(**of, directory=digest(f"keys{at}"), ring_seed="05" * 32)


def _evaluated(effect: e.EvaluateState) -> f.Evaluated | f.ClientEvaluated:
    of: dict[str, Any] = {"party": effect.party, "segment": effect.base.segment}
    if effect.client is None:
        return f.Evaluated(**of, metrics={"test.loss": 0.1})
    sums = {"test/loss": 2.0 * (effect.client + 1), "test/weight:": effect.client + 1.0}
    return f.ClientEvaluated(**of, client=effect.client, sums=sums)


def do(effect: e.Effect) -> f.Fact:
    """The fact that an effect ends with when nothing goes wrong."""
    match effect:
        case e.Build():
            return built(effect.party)
        case e.RunSegment():
            return _trained(effect)
        case e.CommitSegment(party=party, segment=segment):
            of: dict[str, Any] = {"party": party, "metrics": dict(effect.metrics)}
            of |= {"streams": effect.streams, "is_partial": effect.is_partial}
            return committed(segment, effect.step, f"{party}segment{segment}", **of)
        case e.UploadCommit(party=party, segment=segment):
            of = {"digest": digest(f"whole{segment}"), "size_bytes": 2}
            return f.CommitUploaded(party=party, segment=segment, **of)
        case e.TrainClient() | e.CollectUpdate() | e.SumRegion():
            return _updated(effect)
        case e.AccountRound():
            return _accounted(effect)
        case e.PostKeys() | e.RouteShares() | e.JudgeUpdates() | e.AggregateRound():
            return _of_round(effect)
        case e.EvaluateState():
            return _evaluated(effect)
        case e.MergeMetrics():
            return f.MetricsMerged(
                party=effect.party,
                segment=effect.segment,
                clients=tuple(client for client, _ in effect.states),
                worker_id=effect.member.worker_id,
                metrics=dict.fromkeys(effect.metrics, 0.25),
            )
        case e.Release():
            return f.RunReleased()


def start(
    job_json: str,
    *workers: str,
    structural: tuple[str, ...] = (),
    strategies: Strategies = BUILT_IN,
) -> Simulation:
    """A simulation with workers and one submitted run."""
    simulation = Simulation(strategies, structural=structural)
    simulation.come(workers)
    simulation.tell(SubmitRun(RUN, job_json, 0.0))
    return simulation


def opened(strategy: dict[str, Any], *workers: str, **changes: object) -> Simulation:
    """A federated run whose first round is open and in which nobody has answered."""
    simulation = start(job_text(strategy, **changes), *workers)
    simulation.alone()
    return simulation


def trained(simulation: Simulation) -> list[e.TrainClient]:
    """The clients that are to train."""
    return simulation.due(e.TrainClient)


def rejected(
    client: int,
    reason: str = "KeyError: 'label'",
    cause: Cause = Cause.EXCEPTION,
    raised: f.ErrorRecord | None = None,
    round_num: int = 1,
    **more: Any,
) -> f.UpdateRejected:
    """Of a client of the run itself, in its first round unless said."""
    of: dict[str, Any] = {"party": f.ROOT, "round_num": round_num, "client": client, **more}
    return f.UpdateRejected(**of, reason=reason, cause=cause, error=raised)
