"""Members that divide a state anew, of which some are done when the members change once more."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.v1 import worker_pb2 as pb
from stratagem.v1.coordinator_pb2 import HeldSlices, RendezvousMember
from stratagem.worker.engine import Tally, Trainer, build_trainer
from stratagem.worker.engine.slices import StateShare
from stratagem.worker.exchange import ExchangeError
from stratagem.worker.party import state
from stratagem.worker.party.state import agree_on_slices, held_slices
from stratagem.worker.party.survival import survival_of
from stratagem.worker.session.context import ExecutionContext, SessionState
from stratagem.worker.session.control import MemberView
from stratagem.worker.session.states import State
from tests.jobs import user_data
from tests.patience import PATIENCE_S
from tests.worker.engine.sliced_party import (
    digest_of,
    links_over,
    replicated,
    sliced_party,
    step_without_norms,
)
from tests.worker.engine.sliced_training import NUM_SHARDS, sliced_job
from tests.worker.engine.support import ALLOWED, CPU, in_buckets, trainer_of

_NOT_SUMMED_UP: Any = "the report of the step"
BASE = pb.TrainPlan(base=pb.StateRef(step=0))


@dataclass
class Member:
    """A worker that meets others: what it has said and offered, and whether it is cut off before it
    has what they give."""

    name: str
    job: JobSpec
    is_full: bool
    holding: SessionState = field(default_factory=SessionState)
    offered: Future[State] = field(default_factory=Future)
    is_cut: bool = False

    segment = 1

    def new_trainer(self, share: StateShare, *, fresh: bool) -> Trainer:
        return build_trainer(self.job, ALLOWED, share, device=CPU, fresh=fresh)

    @property
    def context(self) -> ExecutionContext:
        return cast("ExecutionContext", self)

    def said(self) -> RendezvousMember:
        return RendezvousMember(
            applied_step=self.holding.applied_step,
            address=self.name,
            slices=held_slices(self.context),
        )

    def agree(self, members: Sequence[RendezvousMember], rank: int, membership: int) -> None:
        share = StateShare(rank, len(members), True, self.is_full)
        view = cast("MemberView", SimpleNamespace(rank=rank, membership=membership))
        try:
            agree_on_slices(self.context, BASE, view, members, share)
        except ExchangeError:
            assert self.is_cut
        finally:
            if not self.offered.done():
                self.offered.cancel()  # nobody is to wait for it

    @property
    def trainer(self) -> Trainer:
        assert isinstance(self.holding.trainer, Trainer)
        return self.holding.trainer


def meet(
    monkeypatch: pytest.MonkeyPatch, members: Sequence[Member], membership: int, cut: str = ""
) -> None:
    """All members divide the state anew; those whose names are in `cut` do not get that far."""
    by_name = {each.name: each for each in members}
    for each in members:
        each.is_cut, each.offered = each.name in cut, Future()

    def offer(
        work: Any, _: object, tensors: Mapping[str, Tensor], texts: Mapping[str, str]
    ) -> None:
        work.offered.set_result((tensors, texts))

    def pull_live(work: Any, _: object, address: str) -> State:
        if work.is_cut:
            raise ExchangeError("the members have changed")
        return by_name[address].offered.result(PATIENCE_S)

    monkeypatch.setattr(state, "offer", offer)
    monkeypatch.setattr(state, "pull_live", pull_live)
    said = [each.said() for each in members]
    with ThreadPoolExecutor(len(members)) as pool:
        ranks = range(len(members))
        list(pool.map(lambda rank: members[rank].agree(said, rank, membership), ranks))


WITH_MUCH_BESIDE = {
    "data": user_data("classes", num_rows=48),
    "weight_average": {"decay": 0.9},
    "execution": {"precision": "Mixed", "amp_dtype": "float16"},
}
"""Running statistics, an average and the scale of the loss, none of which is divided."""
JOBS = {
    "slices": sliced_job("optimizer"),
    "full": sliced_job("full"),
    "much beside": sliced_job("optimizer", "two_norms", **WITH_MUCH_BESIDE),
}


# Who is cut, who meets then, who is cut of these, and who meets at last.
CHAINS = {
    "the first one is done": ("13", "0132", "", "0132"),
    "the last one is done": ("01", "0132", "", "0132"),
    "all but one are done": ("1", "0132", "", "0132"),
    "all are done": ("", "0132", "", "0132"),
    "nobody is done": ("013", "0132", "", "0132"),
    "another one is done then": ("13", "0132", "032", "0132"),
    "the new one is done then": ("13", "0132", "013", "0132"),
    "another one is gone then": ("03", "13", "", "13"),
    "two are gone at last": ("13", "0132", "3", "13"),
}
WITH_LATE = {
    "who has summed up the step gives sums": ("03", "0132", "", "0132", "03"),
    "and of two the one": ("03", "13", "", "13", "3"),
}
TORN = ("the first one is done", "another one is done then", "another one is gone then")
CASES = [
    *(
        pytest.param(
            job,
            False,
            *chain,
            "",
            id=f"{job}: {name}",
            marks=pytest.mark.sweep if job == "full" else (),
        )
        for job in ("slices", "full")
        for name, chain in CHAINS.items()
    ),
    *(pytest.param("slices", False, *chain, id=name) for name, chain in WITH_LATE.items()),
    *(
        pytest.param(job, True, *CHAINS[name], "", id=f"{job}, torn: {name}")
        for job in ("full", "much beside")
        for name in TORN
    ),
]


@pytest.mark.parametrize(("job", "is_torn", "cut", "then", "cut_again", "at_last", "late"), CASES)
def test_no_slice_is_lost_when_members_change_before_all_have_theirs(
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    is_torn: bool,
    cut: str,
    then: str,
    cut_again: str,
    at_last: str,
    late: str,
) -> None:
    """Worker 2 of four is gone; a new one comes while the other three divide the state anew. late:
    who has finished the step late, and does not give what goes with it. is_torn: one of the three
    has not heard the norms of the latest step, and is late itself; the others miss its slice."""
    spec, is_full = JOBS[job], job == "full"
    whole = trainer_of(spec)
    exchange = in_buckets(whole, NUM_SHARDS)
    members = {name: Member(name, spec, is_full) for name in "0123"}
    with (
        links_over("shm", 4) as links,
        sliced_party(spec, links, NUM_SHARDS, is_mirrored=True, is_full=is_full) as party,
    ):
        for _ in range(3):
            whole.train_step(exchange, range(NUM_SHARDS), NUM_SHARDS)
        party.step()
        party.step()
        reports = step_without_norms(party, 1) if is_torn else party.step()
        assert (reports[1] is None) == is_torn
        for member, trainer in zip(members.values(), party.trainers, strict=True):
            member.holding.trainer, member.holding.divided_at = trainer, 1
            member.holding.tally = Tally(segment=1, num_rows=42)
        members["2"].holding = SessionState()
        for membership, (names, away) in enumerate(
            [("013", cut), (then, cut_again), (at_last, "")], start=2
        ):
            meet(monkeypatch, [members[name] for name in names], membership, away)
            for name in late if membership == 2 and not is_torn else ():
                members[name].holding.late = [_NOT_SUMMED_UP]
        trainers = [members[name].trainer for name in at_last]
        copies = [each.copy_state(is_first=rank == 0) for rank, each in enumerate(trainers)]
        assert digest_of(copies) == replicated(whole)
        assert [each.step for each in trainers] == [3] * len(trainers)
        assert len({each.fingerprint() for each in trainers}) == 1
        assert [members[name].holding.tally.num_rows for name in at_last] == [42] * len(at_last)
    exchange.close()


def held(rank: int, at: int) -> RendezvousMember:
    return RendezvousMember(applied_step=5, slices=HeldSlices(rank=rank, size=3, membership=at))


def test_a_step_that_was_finished_late_counts_once_when_all_have_divided_without_its_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its member has failed to gather after it, and takes the sums of others, which hold it."""
    members = [held(0, 3), held(1, 4), held(2, 4)]
    survival = survival_of(members, 0)
    assert survival is not None
    assert survival.holders == {1, 2}
    taken: list[object] = []
    sums = SimpleNamespace(take=lambda _work, trainer: taken.append(trainer))
    monkeypatch.setattr(state, "pull_live", lambda *_: ({}, {}))
    monkeypatch.setattr(state, "load", lambda *_: "the trainer")
    monkeypatch.setattr(state, "take_sums", lambda *_: sums)
    holding = SimpleNamespace(trainer=None, late=["the report of step 5"])
    work, view = (cast("Any", SimpleNamespace(holding=holding, rank=0)) for _ in range(2))
    state._gathered(work, view, members, survival, StateShare(0, 3, True, True))
    assert taken == ["the trainer"]
    assert holding.late == []
