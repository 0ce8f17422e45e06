"""Processes that die while a run is verified: the verdicts and the bits are the same, nobody right
is accused, and no run waits for ever."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from stratagem.client.sdk.blocking import RunHandle
from tests.client.cli.command_line import invoke
from tests.cluster.jobs import Gates, gates_in
from tests.crash.failure_logs import LOGS
from tests.crash.jobs import data_parallel
from tests.crash.rig import Rig, await_event, await_status, until
from tests.crash.verified_rig import (
    ALWAYS,
    ONCE,
    SIGNALS,
    THIRD,
    TRAINER,
    VERIFIER,
    Bench,
    Verdicts,
    verified_rig,
)
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.promise("Whatever dies, a run is verified with the same verdicts.")

BEFORE, AFTER = "coordinator.journal.before_commit", "coordinator.journal.after_commit"
HOW = [
    pytest.param(name, marks=pytest.mark.soak if name == "frozen" else pytest.mark.sweep)
    for name in SIGNALS
]
"""How a worker goes away; a frozen one is missed after the time of its lease."""
ALL_COMMITTED = "12 steps committed"


@pytest.fixture(scope="module")
def parking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gates]:
    with gates_in(tmp_path_factory.mktemp("parking")) as gates:
        yield gates


@pytest.fixture(scope="module")
def started(parking: Gates) -> Iterator[Rig]:
    with verified_rig(parking) as rig:
        yield rig


@pytest.fixture
def bench(started: Rig, gates: Gates, parking: Gates, request: pytest.FixtureRequest) -> Bench:
    request.node.stash[LOGS] = started.logs
    bench = Bench(started, gates, parking)
    bench.settle()
    return bench


@pytest.fixture
def plain_bench(rig: Rig, gates: Gates) -> Iterator[Bench]:
    """The three workers of most crash tests, none of which is ever lost."""
    bench = Bench(rig, gates, gates)
    yield bench
    bench.settle()


RIGHT = Verdicts([], set(), set(), 0, ALL_COMMITTED)
QUARANTINED = Verdicts([(1, "RUN")], {TRAINER}, set(), 1, ALL_COMMITTED)


def at_its_end(run: RunHandle) -> None:
    """Wait until a run has trained and committed everything, so that only verification goes on."""
    await_event(
        run, "SegmentCommitted", lambda e: (e.payload["party"], e.payload["step"]) == ("", 12)
    )


def kinds_of(run: RunHandle) -> list[str]:
    return [event.kind for event in run.events()]


# ---- The coordinator ----


@pytest.mark.cluster
def test_a_coordinator_killed_during_a_check_is_not_even_noticed(plain_bench: Bench) -> None:
    bench = plain_bench
    job = bench.verified()
    expected = bench.expected(job)
    bench.gates.close(f"{VERIFIER}-batch-3")
    with bench.rig.running(job) as run:
        bench.gates.wait_reached(f"{VERIFIER}-batch-3")
        bench.restart("coordinator")
        bench.gates.open()
        assert bench.check(run, expected) == RIGHT
        assert kinds_of(run).count("MembersFormed") == 2


@pytest.mark.sweep
def test_a_coordinator_that_dies_with_a_result_has_it_once(bench: Bench) -> None:
    """Between the first segment that was verified and the second one."""
    job = bench.verified()
    expected = bench.expected(job)
    first, second = f"{VERIFIER}-batch-1", f"{VERIFIER}-batch-3"
    bench.gates.close(first, second)
    with bench.rig.running(job) as run:
        at_its_end(run)
        with bench.rig.armed("coordinator", AFTER, 1):
            bench.gates.open(first)
        assert kinds_of(run)[-2:] == ["SegmentCommitted", "SegmentVerified"]
        bench.gates.open()
        assert bench.check(run, expected) == RIGHT
        assert kinds_of(run).count("SegmentVerified") == 6


@pytest.mark.sweep
def test_a_coordinator_killed_before_the_third_execution_knows_the_second(bench: Bench) -> None:
    job = bench.verified()
    expected = bench.expected(job)
    bench.flaw(TRAINER)
    bench.gates.close(f"{THIRD}-batch-1")
    with bench.rig.running(job) as run:
        bench.gates.wait_reached(f"{THIRD}-batch-1")
        bench.restart("coordinator")
        bench.gates.open()
        assert bench.check(run, expected) == QUARANTINED


@pytest.mark.cluster
def test_a_verdict_that_is_lost_is_found_again(plain_bench: Bench) -> None:
    bench = plain_bench
    job = bench.verified()
    expected = bench.expected(job)
    bench.flaw(TRAINER)
    bench.gates.close(f"{THIRD}-batch-1")
    with bench.rig.running(job) as run:
        at_its_end(run)
        bench.gates.wait_reached(f"{THIRD}-batch-1")
        # Of the third execution and of a probe, the end and the commit.
        with bench.rig.armed("coordinator", BEFORE, 3):
            bench.gates.open()
        assert bench.check(run, expected) == QUARANTINED
    assert bench.quarantined() == {TRAINER}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("failpoint", "flaws"),
    [(BEFORE, ALWAYS), (AFTER, ALWAYS), (BEFORE, ONCE), (AFTER, ONCE)],
    ids=["before-always", "after-always", "before-once", "after-once"],
)
def test_a_coordinator_that_dies_with_a_verdict_punishes_and_returns_once(
    bench: Bench, failpoint: str, flaws: str
) -> None:
    """Penalties, verdict and return are one transaction, which is lost or has all of them."""
    job = bench.verified(data_parallel("AllReduce", 2))
    expected = bench.expected(job)
    bench.flaw("worker-0", flaws)
    bench.gates.close("worker-3-batch-1")
    with bench.rig.running(job) as run:
        at_its_end(run)
        bench.gates.wait_reached("worker-3-batch-1")
        # Of the third execution and of two probes, the end and the commit.
        with bench.rig.armed("coordinator", failpoint, 5):
            bench.gates.open()
        verdicts = bench.check(run, expected)
    blamed = verdicts.quarantined, verdicts.marked
    assert verdicts.refuted == [(1, "RUN")]
    assert verdicts.num_returns == 1
    assert blamed == (
        ({"worker-0"}, set()) if flaws == ALWAYS else (set(), {"worker-0", "worker-1"})
    )
    assert bench.quarantined() == verdicts.quarantined


@pytest.mark.parametrize("failpoint", [BEFORE, AFTER])
@pytest.mark.parametrize("flawed", [TRAINER, VERIFIER])
@pytest.mark.soak
def test_a_coordinator_that_dies_at_each_commit_says_the_same(
    bench: Bench, failpoint: str, flawed: str
) -> None:
    job = bench.verified()
    expected = bench.expected(job)
    bench.flaw(flawed)
    cluster = bench.rig.cluster
    armed = cluster.failpoint_file("coordinator", failpoint)
    with bench.rig.running(job) as run:
        while not run.status().phase.is_final:
            num_starts = cluster.processes["coordinator"].num_starts
            armed.write_text("1")
            until(lambda: not armed.exists() or run.status().phase.is_final, "it dies")
            if not armed.exists():
                cluster.wait_restarted("coordinator", num_starts, timeout_s=PATIENCE_S)
        armed.unlink(missing_ok=True)
        is_run = flawed == TRAINER
        conclusion = "RUN" if is_run else "VERIFIER"
        right = Verdicts([(1, conclusion)], {flawed}, set(), int(is_run), ALL_COMMITTED)
        assert bench.check(run, expected) == right


# ---- Workers ----


@pytest.mark.parametrize("how", HOW)
def test_another_worker_goes_on_with_a_check(bench: Bench, how: str) -> None:
    job = bench.verified()
    expected = bench.expected(job)
    bench.gates.close(f"{VERIFIER}-batch-3")
    with bench.rig.running(job) as run:
        bench.gates.wait_reached(f"{VERIFIER}-batch-3")
        with bench.without(VERIFIER, how):
            assert bench.check(run, expected) == RIGHT


@pytest.mark.sweep
@pytest.mark.parametrize("how", SIGNALS)
def test_another_worker_decides_who_is_wrong(bench: Bench, how: str) -> None:
    job = bench.verified()
    expected = bench.expected(job)
    bench.flaw(TRAINER)
    bench.gates.close(f"{THIRD}-batch-1")
    with bench.rig.running(job) as run:
        bench.gates.wait_reached(f"{THIRD}-batch-1")
        with bench.without(THIRD, how):
            assert bench.check(run, expected) == QUARANTINED


@pytest.mark.parametrize("how", HOW)
def test_a_suspect_that_goes_while_it_is_tested_is_the_only_one_blamed(
    bench: Bench, how: str
) -> None:
    job = bench.verified()
    expected = bench.expected(job)
    bench.flaw(TRAINER)
    bench.gates.close(f"{THIRD}-batch-1")
    with bench.rig.running(job) as run:
        at_its_end(run)
        bench.gates.wait_reached(f"{THIRD}-batch-1")
        bench.gates.close(f"{TRAINER}-batch-1")
        bench.gates.open(f"{THIRD}-batch-1")
        bench.gates.wait_reached(f"{TRAINER}-batch-1")
        with bench.without(TRAINER, how):
            verdicts = bench.check(run, expected)
    assert verdicts.refuted[0] == (1, "RUN")
    assert verdicts.num_returns == 1
    assert verdicts.quarantined | verdicts.marked == {TRAINER}


@pytest.mark.sweep
@pytest.mark.parametrize("is_flawed", [False, True])
def test_a_member_dies_while_its_segment_is_verified(bench: Bench, is_flawed: bool) -> None:
    job = bench.verified(data_parallel("AllReduce", 2))
    expected = bench.expected(job)
    if is_flawed:
        bench.flaw("worker-1")
    bench.gates.close("worker-1-batch-5", "worker-2-batch-1")
    with bench.rig.running(job) as run:
        bench.gates.wait_reached("worker-1-batch-5", "worker-2-batch-1")
        bench.restart("worker-1")
        bench.gates.open()
        verdicts = bench.check(run, expected)
    wrong = Verdicts([(1, "RUN")], {"worker-1"}, set(), 1, ALL_COMMITTED)
    assert verdicts == (wrong if is_flawed else RIGHT)


@pytest.mark.sweep
def test_a_run_whose_last_verifier_is_lost_ends_with_what_was_verified(bench: Bench) -> None:
    job = bench.verified(data_parallel("AllReduce"))
    expected = bench.expected(job)
    bench.gates.close("worker-4-batch-9")  # it computes all four shards
    with bench.rig.running(job) as run:
        at_its_end(run)
        await_event(run, "SegmentVerified")
        bench.gates.wait_reached("worker-4-batch-9")
        with bench.without("worker-4", "lost"):
            text = "12 steps committed; 1 of 6 chosen segments verified"
            assert bench.check(run, expected) == replace(RIGHT, last=text)


@pytest.mark.sweep
def test_two_runs_find_the_same_worker_wrong_at_once(bench: Bench, tmp_path: Path) -> None:
    """It is a member of both. The one cannot test it any more when the other has found it wrong."""
    with ExitStack() as stack:
        benches = []
        for folder in (tmp_path / "a", tmp_path / "b"):
            folder.mkdir()
            gates = stack.enter_context(gates_in(folder))
            benches.append(Bench(bench.rig, gates, bench.parking))
        one, two = benches
        jobs = [each.verified(data_parallel("AllReduce", 3), on="any") for each in benches]
        expected = bench.expected(jobs[0])
        one.gates.close("worker-0-batch-1")  # so that the other run has it, too
        for each in benches:
            each.flaw("worker-0")
        first = stack.enter_context(bench.rig.running(jobs[0]))
        one.gates.wait_reached("worker-0-batch-1")
        second = stack.enter_context(bench.rig.running(jobs[1]))
        assert "worker-0" in await_event(second, "MembersFormed").sentence
        one.gates.open()
        for each, run in ((one, first), (two, second)):
            verdicts = each.check(run, expected)
            assert {conclusion for _, conclusion in verdicts.refuted} <= {"RUN"}
            assert verdicts.quarantined <= {"worker-0"}
            assert verdicts.marked == set()
    assert bench.quarantined() == {"worker-0"}


# ---- Nobody is left ----


@pytest.mark.sweep
def test_a_run_whose_workers_are_all_quarantined_waits_for_a_release(
    parking: Gates, gates: Gates, request: pytest.FixtureRequest
) -> None:
    """The only worker verifies itself, and is wrong once and once more."""
    with verified_rig(parking, num_workers=1) as rig:
        request.node.stash[LOGS] = rig.logs
        bench = Bench(rig, gates, parking)
        job = bench.verified(on="members", steps=60)
        expected = bench.expected(job)
        # The second time long after the run has returned, and long before it has trained all.
        bench.flaw(TRAINER, f"x{40 * '.'}x")
        with rig.running(job) as run:
            await_status(run, lambda s: s.strategy_phase == "WAITING", "the run waits")
            bench.restart("coordinator")
            said = invoke("status", run.run_id, "--coordinator", rig.cluster.address).output
            assert "no worker is available: worker-0 (quarantined: computed another state" in said
            rig.client.release_worker(TRAINER)
            verdicts = bench.check(run, expected)
    assert (verdicts.quarantined, verdicts.marked) == ({TRAINER}, {TRAINER})
    assert verdicts.refuted[0] == (1, "RUN")
    assert len(verdicts.refuted) == 2
