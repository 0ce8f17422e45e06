"""A simulation whose states follow from the states before, for runs that are verified."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stratagem.common.base.ids import Digest, Party, is_within
from stratagem.common.numerics.verification import VERIFIER
from stratagem.coordinator.core import effects as e
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.commands import Report, SubmitRun
from stratagem.coordinator.core.pending import live_blobs, pending
from stratagem.coordinator.core.state import retained
from tests.coordinator.core.jobs import LOCAL, job_text
from tests.coordinator.core.simulation import RUN, Simulation, digest, do

SCORE = "test.accuracy"

Disturb = Callable[[frozenset[str], int, int], str]
"""(workers, segment, number of the execution): text that is no part of the right state."""


def nobody(_workers: frozenset[str], _segment: int, _number: int) -> str:
    return ""


def hashed(*parts: object) -> Digest:
    return digest(str(hash(repr(parts))))


@dataclass
class Computing(Simulation):
    """A simulation whose states follow from the states before, as workers compute them."""

    disturb: Disturb = nobody
    states: dict[tuple[str, str, int], str] = field(default_factory=dict)
    """The state that each party of a run holds after a segment."""
    computed: list[tuple[str, int, frozenset[str]]] = field(default_factory=list)
    """Party, segment and workers of each execution."""

    asked: list[tuple[e.Effect, Report]] = field(default_factory=list)
    """The effects under way, of which those that are cancelled report nothing."""
    stored: set[Digest] = field(default_factory=set)
    """The states in the store, from which those that nothing needs are deleted at once."""

    def _start(self) -> None:
        due = pending(self.state)
        new = sorted(due - self.seen, key=repr)
        self.asked = [(effect, report) for effect, report in self.asked if effect in due]
        self.asked += [(effect, Report(effect.run_id, self._do(effect))) for effect in new]
        reports = [report for _, report in self.asked]
        waiting = [report for report in self.queue if any(report is each for each in reports)]
        self.queue = deque([*waiting, *reports[len(reports) - len(new) :]])
        self.seen = set(due)
        named = ("digest", "client_state")
        under_way = {getattr(report.fact, name, "") for report in self.queue for name in named}
        self.stored &= live_blobs(self.state) | under_way
        for record in self.state.runs.values():
            kept = {commit.digest for commit in retained(record)}
            assert kept <= self.stored, "a commit that counts as kept is gone"

    def _do(self, effect: e.Effect) -> f.Fact:
        fact = do(effect)
        if isinstance(effect, e.RunSegment):
            self._train(effect)
            engine = "solo" if effect.party else "shm"
            known: dict[str, Any] = {"streams": f"after {effect.to_step}", "engine": engine}
            if "member" in effect.party and SCORE in getattr(fact, "metrics", {}):
                state = self.states[effect.run_id, effect.party, effect.segment]
                known["metrics"] = {SCORE: int(state[:8], 16) / 16**8}
            return fact.model_copy(update=known)
        if isinstance(effect, e.CollectUpdate):
            assert effect.digest in self.stored, "a state that is needed is gone"
            return fact.model_copy(update={"digest": hashed("update", effect.digest)})
        if isinstance(effect, e.SumRegion):
            return fact.model_copy(update={"digest": hashed(effect.accepted)})
        if isinstance(effect, e.TrainClient):
            trained, own = self._client(effect), self._client(effect, "state")
            self.stored.add(own)
            return fact.model_copy(update={"digest": trained, "client_state": own})
        if isinstance(effect, e.AggregateRound):
            assert effect.base.digest in self.stored, "a state that is needed is gone"
            updates = [(update.client, update.digest) for update in effect.accepted]
            state = hashed(effect.base.digest, effect.round_num, updates, effect.server_state)
            fact = fact.model_copy(update={"digest": state})
        if isinstance(effect, e.CommitSegment | e.UploadCommit):
            state = self.states[effect.run_id, effect.party, effect.segment]
            last = "0" if isinstance(effect, e.CommitSegment) else "1"
            fact = fact.model_copy(update={"digest": Digest(state.ljust(64, last))})
        self.stored.add(getattr(fact, "digest", Digest("")))
        return fact

    def _train(self, effect: e.RunSegment) -> None:
        assert effect.base.digest in self.stored, "a state that is needed is gone"
        names = frozenset(str(member.worker_id) for member in effect.members)
        number = sum(segment == effect.segment for _, segment, _ in self.computed)
        self.computed.append((effect.party, effect.segment, names))
        before = effect.base.digest[:40]
        if effect.base.segment + 1 != effect.segment:
            before = self.states[effect.run_id, effect.party, effect.segment - 1]
        wrong = self.disturb(names, effect.segment, number)
        text = f"{before}/{effect.to_step}/{effect.num_skipped}/{effect.num_lr_reductions}{wrong}"
        self.states[effect.run_id, effect.party, effect.segment] = digest(str(hash(text)))[:40]

    def _client(self, effect: e.TrainClient, kind: str = "update") -> Digest:
        """What a client has trained; its own state, if it keeps one, is right in any case."""
        kept, wrong = effect.state.digest if effect.state else "", ""
        if kind == "update":
            assert effect.base.digest in self.stored, "a state that is needed is gone"
            assert not kept or kept in self.stored, "a client's state that is needed is gone"
            names = frozenset([str(effect.member.worker_id)])
            number = sum(segment == effect.round_num for _, segment, _ in self.computed)
            self.computed.append((effect.party, effect.round_num, names))
            wrong = self.disturb(names, effect.round_num, number)
        of_client = effect.base.digest, effect.round_num, effect.share or effect.client
        return hashed(kind, *of_client, kept, wrong)

    @property
    def course(self) -> list[tuple[int, Digest]]:
        """The segments and digests of the commits that are kept in the end."""
        return [(commit.segment, commit.digest) for commit in retained(self.record)]

    def verifying(self) -> list[tuple[int, frozenset[str]]]:
        """What the verifier has executed, in order."""
        return [
            (segment, names)
            for party, segment, names in self.computed
            if is_within(Party(party), VERIFIER)
        ]


def verified(strategy: dict[str, Any] = LOCAL, sample: float = 1.0, **changes: Any) -> str:
    sections = {"checkpoint": {"every": "5 steps"}, "seed": 7, "retention": 2, **changes}
    on = sections.pop("on", "spare")
    if sample:
        sections["verification"] = {"sample": sample, "on": on}
    return job_text(strategy, **sections)


def run(
    text: str,
    *workers: str,
    disturb: Disturb = nobody,
    crashes: bool = False,
    tags: tuple[str, ...] = (),
) -> Computing:
    simulation = Computing(disturb=disturb)
    simulation.come(workers, tags=tags)
    simulation.tell(SubmitRun(RUN, text, 0.0))
    while simulation.queue:
        simulation.now_s += 1.0
        simulation.step()
        if crashes:
            simulation.crash()
    return simulation
