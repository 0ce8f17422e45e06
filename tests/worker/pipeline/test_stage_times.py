"""What a rank measures of a step and of its hops, and the order that `auto` stands for by it."""

import time
from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch

from stratagem.common.history.recording import NONE, StageReport
from stratagem.common.pipeline.schedules import EAGER_FROM, Action, TaskKind, has_eager, suited
from stratagem.worker.host.clock import clock_number
from stratagem.worker.pipeline.build import StageAssignment
from stratagem.worker.pipeline.messages import Address, LocalPost, LocalTransport, Message
from stratagem.worker.pipeline.schedule import Hops, Meter, measure_hops
from stratagem.worker.pipeline.times import StageTimes
from tests.reference.loops import sharded_loop
from tests.worker.pipeline.graphs import BRANCHES, SKIPS
from tests.worker.pipeline.support import ALLOWED, Party, cut, deep_job

F, B, W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT


def do(times: StageTimes, kind: TaskKind, stage: int, micro_batch: int) -> None:
    if kind is not W:
        with times.waiting(stage):
            pass
    with times.computing(Action(kind, stage, micro_batch)):
        pass


def test_a_report_has_each_piece_of_work_of_all_passes() -> None:
    times = StageTimes(torch.device("cpu"), 1, {1: (0,), 3: (2,)})
    times.begin()
    for count in (2, 0, 1):  # shards, one of which has no rows
        with times.working(count):
            for stage in (1, 3):
                for number in range(count):
                    do(times, F, stage, number)
                    do(times, B, stage, number)
    times.exchanged()
    with times.updating():
        pass
    told = times.actions()
    busy = {each.party: each.observed["busy_s"] for each in times.reports()}
    times.begin()
    do(times, W, 3, 9)  # of the next step

    parts = told()
    assert [part.party for part in parts] == ["actions/1", "actions/3"]
    reports = [StageReport.of(part.observed) for part in parts]
    keys = [[(each.kind, each.micro_batch) for each in report.actions] for report in reports]
    passed = [(kind, number) for number in range(3) for kind in ("forward", "backward")]
    assert keys == [[*passed, ("exchange", NONE), ("optimizer", NONE)], passed]
    assert [(each.rank, each.sources, each.clock) for each in reports] == [
        (1, [0], clock_number()),
        (1, [2], clock_number()),
    ]
    assert reports[0].began_s == reports[1].began_s > 0.0
    for stage, report in zip((1, 3), reports, strict=True):
        assert all(a.end_s <= b.begin_s for a, b in pairwise(report.actions))
        lasted = [each.end_s - each.begin_s for each in report.actions if each.micro_batch != NONE]
        assert abs(sum(lasted) - busy[f"stage/{stage}"]) <= len(lasted) * 2.0**-20


def test_every_rank_tells_what_its_schedule_has_it_do() -> None:
    placement = StageAssignment(
        cut([str(n) for n in range(8)], 4, 4), (0, 1), 3, schedule="zero_bubble"
    )
    party = Party(deep_job(), placement)
    reports = party.each(lambda runner: runner.train_step())
    for stage, report in enumerate(reports):
        (part,) = report.actions()
        its = StageReport.of(part.observed)
        assert (part.party, its.rank) == (f"actions/{stage}", stage)
        assert its.sources == ([0] if stage else [])
        done = sorted((each.kind, each.micro_batch) for each in its.actions)
        halves = [(kind, n) for kind in ("forward", "input", "weight") for n in range(3)]
        assert done == sorted([*halves, ("exchange", NONE), ("optimizer", NONE)])


DEEP = [str(i) for i in range(8)]
THREE = StageAssignment(cut(DEEP, 2, 3, 3), (0, 1, 2), 2)
HOP_S = 0.003


class Slow:
    """A transport whose messages take a while."""

    def __init__(self, inner: LocalTransport) -> None:
        self._inner = inner

    def begin(self, step: int, awaited: Iterable[Address]) -> None:
        self._inner.begin(step, awaited)

    def send(self, address: Address, message: Message) -> None:
        self._inner.send(address, message)

    def recv(self, address: Address, timeout_s: float) -> Message:
        message = self._inner.recv(address, timeout_s)
        time.sleep(HOP_S)
        return message

    def end(self, timeout_s: float) -> None:
        self._inner.end(timeout_s)

    def cut(self) -> None:
        self._inner.cut()


def slow_party(placement: StageAssignment = THREE) -> Party:
    size = max(placement.ranks) + 1
    post = LocalPost(size)
    return Party(deep_job(), placement, [Slow(LocalTransport(post, rank)) for rank in range(size)])


def meter(seconds: float) -> Meter:
    spent = {kind: [seconds] for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)}
    return Meter(torch.device("cpu"), spent, {})


@pytest.mark.parametrize(
    ("hop_s", "schedule"), [(0.0, "1f1b"), (EAGER_FROM, "1f1b"), (EAGER_FROM + 1e-9, "eager")]
)
def test_slow_hops_ask_for_more_warm_up(hop_s: float, schedule: str) -> None:
    assert suited(hop_s, 1.0) == schedule


@pytest.mark.parametrize(
    ("rank_of", "answer"), [((0, 1), True), ((1, 0, 2), True), ((0,), False), ((0, 1, 0, 1), False)]
)
def test_eager_is_another_order_with_one_stage_per_rank(
    rank_of: tuple[int, ...], answer: bool
) -> None:
    assert has_eager(rank_of) is answer


def test_all_ranks_come_to_the_slowest_hop_and_the_mean_of_what_they_compute() -> None:
    party = slow_party()
    meters = {id(runner): meter(float(rank)) for rank, runner in enumerate(party.runners)}
    found = party.each(lambda runner: measure_hops(runner._lane, 0, meters[id(runner)]))
    assert found == [found[0]] * 3
    assert found[0] == Hops(found[0].hop_s, 2.0)
    assert found[0].hop_s >= HOP_S


@pytest.mark.parametrize(("compute_s", "schedule"), [(HOP_S / 10, "eager"), (1e4, "1f1b")])
def test_auto_is_settled_after_the_first_step_with_the_bits_of_the_loop(
    compute_s: float, schedule: str
) -> None:
    party = slow_party()
    losses = party.train(1)
    assert {runner.schedule_text for runner in party.runners} == {"1f1b (auto)"}
    for runner in party.runners:
        assert runner.schedules.meter is not None
        for kind, seconds in runner.schedules.meter.seconds.items():
            runner.schedules.meter.seconds[kind] = [compute_s for _ in seconds]  # whatever it was
    losses += party.train(2)
    assert {runner.schedule_text for runner in party.runners} == {f"{schedule} (auto)"}
    expected = sharded_loop(deep_job(), ALLOWED, 1, 3, micro_batch_size=2)
    assert losses == expected.losses
    model = party.model()
    assert all(torch.equal(model[name], each) for name, each in expected.state.items())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_schedule_that_was_asked_for_is_kept(schedule: str) -> None:
    party = slow_party(StageAssignment(THREE.partitions, THREE.ranks, 2, schedule))
    party.train(2)
    assert {runner.schedule_text for runner in party.runners} == {schedule}


@pytest.mark.parametrize(
    ("graph", "partitions"),
    [
        (SKIPS, (("a", "t"), ("b", "c", "d", "sum"), ("e", "all", "head"))),
        (BRANCHES, (("a", "norm"), ("left",), ("right",))),
    ],
)
def test_neighbours_by_skips_and_branches_are_measured_too(
    graph: dict[str, object], partitions: tuple[tuple[str, ...], ...]
) -> None:
    loss = "tests.userland.losses:two_heads" if graph is BRANCHES else "cross_entropy"
    spec = deep_job({"graph": graph}, loss=loss)
    party = Party(spec, StageAssignment(partitions, (0, 1, 2), 2))
    expected = sharded_loop(spec, ALLOWED, 1, 3, micro_batch_size=2)
    assert party.train(3) == expected.losses
    assert len({runner.schedule_text for runner in party.runners}) == 1
