"""Clients that fail are rejected alone, and a round with too few updates fails or waits."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.text import without_spreads
from stratagem.common.job import JobSpec
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.commands import ResumeRun, Tick
from stratagem.coordinator.core.decide import world_of
from stratagem.coordinator.core.effects import Build, EvaluateState, TrainClient
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.effects.client_reports import defect, defect_before
from stratagem.coordinator.effects.context import MAX_ERRORS, JournaledErrors
from stratagem.coordinator.strategies.federated.decisions import may_move, only_one_to_build
from stratagem.coordinator.strategies.federated.rejections import cause_of, reason_of
from stratagem.coordinator.strategies.federated.roster import ASK_AGAIN_S
from tests.coordinator.core.ask_every_run import next_deadline
from tests.coordinator.core.jobs import FEDERATED, POPULATION_SECTIONS, job_text, population
from tests.coordinator.core.simulation import (
    RUN,
    Simulation,
    do,
    ending,
    member,
    opened,
    register,
    rejected,
    start,
    trained,
)

pytestmark = pytest.mark.core


LABEL = f.ErrorRecord(
    type="KeyError",
    message="'label'",
    traceback='File "train_plan.py", line 3',
    worker_id="a",
    activity="round 1, client 0, step 1",
)
WARD = {"data": {"worker_local": "ward"}}
WAIT = {"on_missing_quorum": "wait"}


def error(kind: str, message: str = "no", traceback: str = "at line 3") -> f.ErrorRecord:
    return f.ErrorRecord(
        type=kind, message=message, traceback=traceback, worker_id="a", activity="training"
    )


def federation(options: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {**FEDERATED, "num_clients": 3, "options": options or {}, **changes}


def answer(simulation: Simulation, *clients: int) -> None:
    """These clients, which are being trained, send their updates."""
    for effect in trained(simulation):
        if effect.client in clients:
            simulation.report(do(effect))


def closing(simulation: Simulation) -> tuple[list[int], str]:
    """Who is in the only round that was closed, and why it was."""
    closed = simulation.fact(f.RoundClosed)
    return [accepted.client for accepted in closed.accepted], closed.reason


def local(options: dict[str, Any] | None = None, **changes: Any) -> Simulation:
    """Three sites; each client lives on its own, and the first is to build the model."""
    simulation = start(job_text(federation(options), **WARD, **changes))
    simulation.sites("abc")
    return simulation


# ---- what a failure is ----


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (error("KeyError"), Cause.EXCEPTION),
        (error("MemoryError"), Cause.MEMORY),
        (error("torch.OutOfMemoryError"), Cause.MEMORY),
        (error("numpy._core._exceptions._ArrayMemoryError"), Cause.MEMORY),
        (error("RuntimeError", "DefaultCPUAllocator: can't allocate memory"), Cause.MEMORY),
        (error("RuntimeError", "CUDA error: out of memory"), Cause.MEMORY),
        (error("ValueError", "out of memory, said the user"), Cause.EXCEPTION),
        (error("TimeoutError"), Cause.TIMEOUT),
        (error("FloatingPointError", "non-finite loss", traceback=""), Cause.NOT_FINITE_LOSS),
        (error("FloatingPointError", "the user's own"), Cause.EXCEPTION),
        (
            error("InvalidInputError", '"m:f" is not allowed on this worker, which', ""),
            Cause.REFUSED_BY_SITE,
        ),
        (
            error("InvalidInputError", "is really x, which this worker does not allow", ""),
            Cause.REFUSED_BY_SITE,
        ),
        (error("RefusedBySiteError", "site a refuses: data", ""), Cause.REFUSED_BY_SITE),
        (error("SiteClosedError", "site a is closed: opens Mon", ""), Cause.OUTSIDE_WINDOW),
        (error("SiteClosedError", "the user's own"), Cause.EXCEPTION),
        (error("InvalidInputError", "client 3 has no rows", traceback=""), Cause.EXCEPTION),
    ],
)
def test_the_cause_of_an_exception(found: f.ErrorRecord, cause: Cause) -> None:
    assert cause_of(found) is cause


def test_a_reason_is_one_line_of_bounded_length() -> None:
    assert reason_of(LABEL) == "KeyError: 'label'"
    assert reason_of(error("E", "a\n  b\x0bc")) == "E: a b c"
    assert reason_of(error("E", "said of the job", traceback="")) == "said of the job"
    assert len(reason_of(error("E", "x" * 10_000))) == 300


@pytest.mark.parametrize(
    ("loss", "num_steps", "num_skipped", "cause"),
    [
        (0.5, 4, 0, None),
        (0.5, 4, 3, None),
        (0.0, 4, 4, Cause.NOT_FINITE),
        (float("nan"), 4, 0, Cause.NOT_FINITE_LOSS),
        (float("inf"), 4, 3, Cause.NOT_FINITE_LOSS),
        (0.5, 0, 0, None),
    ],
)
def test_what_is_wrong_with_a_round_of_steps(
    loss: float, num_steps: int, num_skipped: int, cause: Cause | None
) -> None:
    found = defect(loss, num_steps, {"train.skipped_steps": num_skipped})
    assert (found and found[0]) == cause


@pytest.mark.parametrize(
    ("q", "loss", "cause", "reason"),
    [
        (None, None, None, ""),
        (None, float("nan"), None, ""),
        (0.2, 0.0, None, ""),
        (0.2, None, Cause.REFUSED_BY_SITE, "its loss before training is not told"),
        (0.2, float("inf"), Cause.NOT_FINITE_LOSS, "its mean loss before training is inf"),
        (0.0, float("nan"), Cause.NOT_FINITE_LOSS, "its mean loss before training is nan"),
        (1.0, -0.25, Cause.NOT_FINITE_LOSS, "its mean loss before training is -0.25, and q weighs"),
    ],
)
def test_a_loss_before_training_must_be_one_to_weigh_by(
    q: float | None, loss: float | None, cause: Cause | None, reason: str
) -> None:
    found = defect_before(q, loss)
    if cause is None:
        assert found is None
    else:
        assert found is not None
        assert found[0] is cause
        assert found[1].startswith(reason)


def test_an_exception_is_journaled_once_in_a_round() -> None:
    errors, (effect, *_) = JournaledErrors(), trained(opened(federation(), "a"))
    assert errors.is_new(effect, LABEL)
    assert not errors.is_new(effect, LABEL)
    others = [errors.is_new(effect, error("E", str(number))) for number in range(20)]
    assert others.count(True) == MAX_ERRORS - 1
    errors.forget(RUN)
    assert errors.is_new(effect, LABEL)


# ---- a round without the clients that failed ----


def test_a_client_that_fails_is_rejected_alone_in_every_round() -> None:
    simulation = opened(federation(), "a")
    for number in (1, 2, 3):
        simulation.report(rejected(1, raised=LABEL, round_num=number))
        assert {effect.client for effect in trained(simulation)} == {0, 2}
        answer(simulation, 0, 2)
        simulation.queue.clear()
        simulation.seen.clear()
        simulation.tell(Tick())
        simulation.step()  # the fold
    run = simulation.record
    assert run.ended is RunPhase.COMPLETED
    assert run.reason == "3 rounds committed; rejected: client 1 in 3 rounds (KeyError: 'label')"
    assert run.is_reproducible
    closed = simulation.facts(f.RoundClosed)
    assert [[a.client for a in fact.accepted] for fact in closed] == [[0, 2]] * 3
    text = "round 1 closed: 2 of 3 updates, 1 rejected (client 1: KeyError: 'label')"
    assert sentence(closed[0]).startswith(text)
    assert not any(fact.by_policy for fact in closed)
    simulation.crash()


MACHINES = (
    *(Cause.CRASHED, Cause.MEMORY, Cause.TIMEOUT, Cause.OUTSIDE_WINDOW),
    *(Cause.KEYS_LOST, Cause.ABSENT),
)


@pytest.mark.parametrize("cause", Cause)
def test_what_depends_on_machines_is_not_reproducible(cause: Cause) -> None:
    simulation = opened(federation(), "a")
    simulation.report(rejected(1, cause=cause))
    answer(simulation, 0, 2)
    assert simulation.record.is_reproducible is (cause not in MACHINES)


def test_the_same_is_so_inside_a_population() -> None:
    strategy = population(2, 1, federation(rounds=1), {"method": "Truncation", "fraction": 0.5})
    evaluation = {"metrics": [], "best": "loss", "mode": "min"}
    sections = {**POPULATION_SECTIONS, "steps_per_generation": 1, "evaluation": evaluation}
    simulation = start(job_text(strategy, **sections), "a")
    simulation.until_due(TrainClient)
    effect = trained(simulation)[0]
    fact = rejected(effect.client, cause=Cause.CRASHED).model_copy(update={"party": effect.party})
    simulation.report(fact)
    assert not simulation.record.is_reproducible
    simulation.complete()


VALUES = ("values of 'w'", Cause.NOT_FINITE)


def test_the_reason_groups_clients_that_fail_alike() -> None:
    simulation = opened(federation(num_clients=5), "a")
    simulation.report(rejected(0), rejected(3), rejected(1, *VALUES))
    answer(simulation, 2, 4)
    assert closing(simulation)[1] == (
        "round 1: 2 of 5 updates, 3 rejected (clients 0, 3: KeyError: 'label'; "
        "client 1: values of 'w')"
    )


def test_without_any_update_the_run_fails_with_the_commonest_reason() -> None:
    simulation = opened(federation(num_clients=4), "a")
    simulation.report(rejected(2, *VALUES), *(rejected(n, raised=LABEL) for n in (0, 1, 3)))
    run = simulation.record
    assert run.ended is RunPhase.FAILED
    assert run.reason == (
        "round 1: 0 of 4 updates; 3 raised KeyError: 'label' (clients 0, 1, 3); "
        "1 not finite: values of 'w' (client 2)"
    )
    assert run.error == LABEL


def test_a_sentence_names_some_clients_and_their_workers_where_rows_are_local() -> None:
    simulation = start(job_text(federation(num_clients=2), **WARD))
    simulation.sites(["anna", "berta"])
    simulation.step()
    simulation.report(rejected(0), rejected(1))
    assert simulation.record.reason == (
        "round 1: 0 of 2 updates; 2 raised KeyError: 'label' (clients 0 (anna), 1 (berta))"
    )
    simulation = opened(federation(num_clients=100), "a")
    simulation.report(*map(rejected, range(100)))
    assert simulation.record.reason.endswith(
        "100 raised KeyError: 'label' (clients 0, 1, 2, 3, 4, 5, 6, 7 and 92 more)"
    )


def test_no_client_may_fail_where_the_job_says_so() -> None:
    strict = federation({"on_client_error": "fail"})
    for cause in (Cause.EXCEPTION, Cause.NOT_FINITE, Cause.LAYOUT):
        simulation = opened(strict, "a")
        answer(simulation, 0)
        simulation.report(rejected(1, cause=cause, raised=LABEL))
        run = simulation.record
        assert run.ended is RunPhase.FAILED
        assert (run.reason, run.error) == ("round 1: client 1: KeyError: 'label'", LABEL)
    simulation = opened(strict, "a")
    for number in range(3):
        told = ending("a", number, status=1, run_id=RUN, party="client1")
        simulation.tell(register("a", number + 1, told))
    assert simulation.record.reason.startswith("round 1: client 1: it has ended 3 worker processes")


# ---- quorum ----


def test_a_quorum_is_not_lowered_by_failures() -> None:
    simulation = opened(federation({"quorum": 2}), "a")
    simulation.report(rejected(0), rejected(1, *VALUES))
    answer(simulation, 2)
    assert simulation.record.reason == (
        "round 1: 1 of 3 updates; 1 raised KeyError: 'label' (client 0); "
        "1 not finite: values of 'w' (client 1); 2 are needed"
    )


def test_over_selection_without_a_quorum_takes_what_did_not_fail() -> None:
    strategy = federation(
        {"over_select": 1}, num_clients=4, client_selection={"method": "Random", "fraction": 0.5}
    )
    simulation = opened(strategy, "a")
    first, second, third = (effect.client for effect in trained(simulation))
    simulation.report(rejected(first), rejected(second))
    answer(simulation, third)
    assert closing(simulation)[0] == [third]


def test_a_deadline_may_be_waited_out_for_the_quorum() -> None:
    simulation = opened(federation({"quorum": 2, "round_deadline_s": 60.0, **WAIT}), "a")
    answer(simulation, 1)
    simulation.tick(61.0)
    assert sentence(simulation.fact(f.RoundWaits)) == (
        "round 1: 1 of 3 updates, deadline passed; 2 are needed; the round waits"
    )
    assert next_deadline(simulation.state) is None
    assert simulation.phase is RunPhase.RECOVERING
    answer(simulation, 2)
    assert closing(simulation)[0] == [1, 2]
    assert simulation.fact(f.RoundClosed).by_policy
    assert not simulation.record.is_reproducible


def worker_local(options: dict[str, Any]) -> Simulation:
    """Three sites in an open round."""
    simulation = local(options)
    simulation.alone()
    return simulation


def test_a_round_that_waits_asks_a_failed_client_again_when_its_worker_is_a_new_one() -> None:
    simulation = worker_local({"quorum": 3, **WAIT})
    answer(simulation, 0, 2)
    simulation.report(rejected(1))
    assert len(simulation.facts(f.RoundWaits)) == 1
    assert not trained(simulation)
    assert "2 of 3 updates" not in simulation.reason
    assert "3 of 3 clients have answered, 1 rejected (client 1 (b): KeyError" in simulation.reason
    simulation.lose("b", reason="stopped by its site")
    simulation.sites("b", 1)
    assert [effect.client for effect in trained(simulation)] == [1]
    assert simulation.facts(f.RoundWaits)[-1].asked_again == (1,)
    simulation.crash()
    simulation.queue.clear()
    simulation.report(rejected(1, "ValueError: still not"))
    assert not trained(simulation)  # not on the same process
    simulation.sites("b", 2)
    answer(simulation, 1)
    assert closing(simulation)[0] == [0, 1, 2]


@pytest.mark.parametrize(
    ("cause", "opens_in_s", "after_s"),
    [
        (Cause.REFUSED_BY_SITE, 0.0, ASK_AGAIN_S),
        (Cause.OUTSIDE_WINDOW, 0.0, ASK_AGAIN_S),
        (Cause.OUTSIDE_WINDOW, 7200.0, 7200.0),
    ],
)
def test_a_round_that_waits_asks_a_site_again_that_has_refused(
    cause: Cause, opens_in_s: float, after_s: float
) -> None:
    """It may have changed its file, which its worker reads at the next question."""
    simulation = worker_local({"quorum": 3, **WAIT})
    answer(simulation, 0, 2)
    refusal = rejected(1, cause=cause, opens_in_s=opens_in_s)
    simulation.report(refusal)
    assert not trained(simulation)
    for _ in range(2):
        due_s = simulation.now_s + after_s
        assert next_deadline(simulation.state) == due_s
        simulation.tick(due_s - 1)
        assert not trained(simulation)
        simulation.tick(due_s)
        assert [effect.client for effect in trained(simulation)] == [1]
        waits = simulation.facts(f.RoundWaits)[-1]
        assert (waits.asked_again, waits.refused) == ((1,), (1,))
        simulation.report(refusal)
    simulation.lose("b", reason="gone")
    simulation.tick(simulation.now_s + after_s)
    assert not trained(simulation)
    assert simulation.facts(f.RoundWaits)[-1].asked_again == ()
    later_s = next_deadline(simulation.state)
    assert later_s is not None
    assert later_s > simulation.now_s
    simulation.sites("b")
    simulation.tick(simulation.now_s + after_s)
    answer(simulation, 1)
    assert len(simulation.facts(f.RoundClosed)) == 1
    assert next_deadline(simulation.state) is None


def test_without_a_quorum_a_round_waits_for_all_that_are_asked_again() -> None:
    simulation = worker_local(WAIT)
    simulation.report(*map(rejected, range(3)))
    assert simulation.phase is RunPhase.RECOVERING
    simulation.sites("ab", 1)
    assert [effect.client for effect in trained(simulation)] == [0, 1]
    answer(simulation, 0)
    assert not simulation.facts(f.RoundClosed)
    answer(simulation, 1)
    assert closing(simulation)[0] == [0, 1]


def test_simulated_clients_are_asked_again_once_on_every_worker() -> None:
    simulation = opened(federation(WAIT, num_clients=1), "a", "b")
    simulation.report(rejected(0))
    assert simulation.due_one(TrainClient).member == member("b")
    simulation.report(rejected(0))
    assert not trained(simulation)
    simulation.come("c")
    assert simulation.due_one(TrainClient).member == member("c")
    simulation.complete()


def test_a_resumed_run_asks_failed_clients_again_and_gives_the_round_its_time() -> None:
    simulation = opened(federation({"quorum": 3, "round_deadline_s": 60.0}), "a")
    answer(simulation, 0, 2)
    simulation.now_s = 50.0
    simulation.report(rejected(1))
    assert simulation.phase is RunPhase.FAILED
    simulation.run()  # the workers let go of it
    simulation.now_s = 100.0
    simulation.tell(ResumeRun(RUN))
    assert simulation.due_one(TrainClient).client == 1
    assert next_deadline(simulation.state) == 160.0
    simulation.complete()


def test_a_late_client_that_fails_is_forgotten() -> None:
    options = {"over_select": 1, "late_updates": {"discount": 0.5}}
    selection = {"method": "Random", "fraction": 0.3}
    simulation = opened(federation(options, num_clients=4, client_selection=selection), "a")
    late, *others = trained(simulation)
    answer(simulation, *(effect.client for effect in others))
    simulation.report(rejected(late.client, raised=LABEL))
    simulation.complete()


# ---- evaluation by clients ----


def evaluating(options: dict[str, Any] | None = None) -> Simulation:
    """Three sites with rows of their own, in one round; all evaluations are due."""
    evaluation = {"split": "test", "metrics": []}
    simulation = start(job_text(federation(options, rounds=1), **WARD, evaluation=evaluation))
    simulation.sites("abc")
    simulation.until_due(EvaluateState)
    simulation.queue.clear()
    return simulation


def evaluated(client: int, text: str = "") -> f.ClientEvaluated:
    sums = {} if text else {"test/loss": 2.0 * (client + 1), "test/weight:": client + 1.0}
    return f.ClientEvaluated(party=f.ROOT, segment=1, client=client, sums=sums, reason=text)


def test_a_client_that_cannot_evaluate_or_crashes_is_left_out_alone() -> None:
    simulation = evaluating()
    simulation.report(evaluated(0), evaluated(1, "KeyError: 'label'"), evaluated(2))
    assert without_spreads(simulation.fact(f.Evaluated).metrics) == {"test.loss": 2.0}
    assert simulation.phase is RunPhase.COMPLETED
    text = "segment 1: client 1 could not evaluate it: KeyError: 'label'"
    assert text in [sentence(fact) for fact in simulation.facts(f.ClientEvaluated)]
    simulation = evaluating()
    for number in range(3):
        told = ending("b", number, status=1, run_id=RUN, party="evaluate")
        simulation.tell(register("b", number + 1, told, local_data=("ward",)))
    (found,) = [fact for fact in simulation.facts(f.ClientEvaluated) if fact.reason]
    assert (found.client, found.sums) == (1, {})
    simulation.report(evaluated(0), evaluated(2))
    assert simulation.phase is RunPhase.COMPLETED


def test_an_evaluation_that_waits_for_a_site_says_for_which() -> None:
    simulation = evaluating()
    simulation.report(evaluated(0), evaluated(2))
    assert simulation.reason == ""
    simulation.lose("b", reason="gone")
    assert (simulation.phase, simulation.reason) == (
        RunPhase.RUNNING,
        "round 1 waits to be evaluated by client 1 (b), not here",
    )
    simulation.sites("b", 1)
    assert simulation.reason == ""


def test_an_evaluation_that_nobody_can_do_or_none_may_fail_fails_the_run() -> None:
    simulation = evaluating()
    simulation.report(*(evaluated(client, "KeyError: 'label'") for client in range(3)))
    said = "the evaluation of round 1 has failed: client 0: KeyError: 'label'; client 1: "
    assert simulation.record.reason.startswith(said)
    simulation = evaluating({"on_client_error": "fail"})
    simulation.report(evaluated(1, "KeyError: 'label'"))
    said = "the evaluation of round 1 has failed: client 1: KeyError: 'label'"
    assert simulation.record.reason == said


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("on_client_error", "is not one of reject, fail"),
        ("on_missing_quorum", "is not one of fail, wait"),
    ],
)
def test_other_words_are_refused(option: str, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        JobSpec.from_json(job_text(federation({option: "ignore"})))


# ---- the build, where each site has rows of its own ----


def build_failed(member: f.Member) -> f.BuildFailed:
    return f.BuildFailed(party=f.ROOT, member=member, reason="KeyError: 'label'", error=LABEL)


def unbuilt() -> Simulation:
    simulation = local()
    simulation.queue.clear()
    return simulation


def test_a_site_that_cannot_build_the_model_or_crashes_leaves_it_to_another_one() -> None:
    simulation = unbuilt()
    first = simulation.due_one(Build).member
    failed = build_failed(first)
    simulation.report(failed)
    assert simulation.due_one(Build).member != first
    simulation.crash()
    simulation.complete()
    assert sentence(failed) == f"{first.worker_id} cannot build the model: KeyError: 'label'"
    simulation = unbuilt()
    name = simulation.due_one(Build).member.worker_id
    for number in range(3):
        told = ending(name, number, status=-11, run_id=RUN, party="build")
        simulation.tell(register(name, number + 1, told, local_data=("ward",)))
    assert "has ended 3 worker processes" in simulation.fact(f.BuildFailed).reason


def test_a_model_that_no_site_can_build_fails_the_run_and_the_last_one_is_known() -> None:
    simulation = unbuilt()
    for is_last in (False, False, True):
        member, run = simulation.due_one(Build).member, simulation.record
        world = world_of(simulation.state)
        assert only_one_to_build(run.job, run.value, world, member) is is_last
        simulation.report(build_failed(member))
    run = simulation.record
    assert run.reason == (
        "no worker can build the model: a: KeyError: 'label'; b: KeyError: 'label'; "
        "c: KeyError: 'label'"
    )
    assert run.error == LABEL


@pytest.mark.parametrize(
    ("options", "data", "raised", "may"),
    [
        ({}, {"worker_local": "ward"}, error("KeyError", "'label'"), True),
        ({"on_client_error": "fail"}, {"worker_local": "ward"}, error("KeyError", "'x'"), False),
        ({}, {"entrypoint": "m:d"}, None, False),
        ({}, {"entrypoint": "m:d"}, error("KeyError", "'label'"), False),
        ({}, {"entrypoint": "m:d"}, error("ModuleNotFoundError", "no module"), True),
        ({}, {"path": "rows.safetensors"}, error("NotFoundError", "no file rows", ""), True),
        ({}, {"entrypoint": "m:d"}, error("torch.OutOfMemoryError", "of a GPU"), True),
    ],
)
def test_rows_of_its_own_and_what_it_lacks_tell_one_builder_from_another(
    options: dict[str, Any], data: dict[str, str], raised: f.ErrorRecord | None, may: bool
) -> None:
    assert may_move(JobSpec.from_json(job_text(federation(options), data=data)), raised) is may


def test_a_model_of_one_party_is_built_where_its_worker_is() -> None:
    lacks_it = error("ModuleNotFoundError", "no module")
    assert not may_move(JobSpec.from_json(job_text({"type": "Local"})), lacks_it)
