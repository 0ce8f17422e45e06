"""When the watchdog gives a torch thread up, with plans, moves and times as literals."""

import faulthandler
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread, get_ident
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.host.stalls import Activity, StallLimits
from stratagem.worker.plans.execution import PlanExecution
from stratagem.worker.service.watchdog import Watchdog, write_stacks_in

LIMITS = StallLimits(report_s=60.0, grace_s=30.0, compile_s=900.0)


class Plan(PlanExecution):
    """A plan as the watchdog sees it."""

    is_attended, is_deserted, is_ended = True, False, False

    def __init__(self, run_id: str, submitted_by: str = "", admission: Any = None) -> None:
        self.stalls: list[pb.Stall] = []
        outbox = SimpleNamespace(activity="training", step=0, stall=self.stalls.append)
        control = SimpleNamespace(view=SimpleNamespace(members=()))
        key = SimpleNamespace(run_id=run_id, party="")
        self.key = cast("Any", SimpleNamespace(kind="train"))
        request = SimpleNamespace(submitted_by=submitted_by)
        work = SimpleNamespace(
            key=key, outbox=outbox, control=control, request=request, admission=admission
        )
        self._work = cast("Any", work)


@dataclass
class Scene:
    """A worker whose torch thread is this one, at whatever the test says."""

    plans: list[Plan] = field(default_factory=list)
    runs: set[str] = field(default_factory=lambda: {"a", "b"})
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.thread = SimpleNamespace(
            owner=None, activity=Activity(), is_busy=True, ident=get_ident()
        )
        self.stats = SimpleNamespace(num_steps=7, stalled_s=0.0)
        host = SimpleNamespace(thread=self.thread, stats=self.stats, worker_id="w")
        sessions = SimpleNamespace(
            awaiting_thread=lambda: iter(self.plans), holds_run=self.runs.__contains__
        )
        self.dog = Watchdog(cast("Any", host), cast("Any", sessions), LIMITS, self.lost.append)

    def runs_now(self, run_id: str = "a") -> Plan:
        """Give the thread to a new plan."""
        self.thread.owner = plan = Plan(run_id)
        self.plans.append(plan)
        return plan

    def waits(self, run_id: str = "b", **changes: Any) -> Plan:
        self.plans.append(Plan(run_id, **changes))
        return self.plans[-1]

    def lost_at(self, *times_s: float) -> list[float]:
        """Return at which of these times the thread was given up."""
        found = []
        for now_s in times_s:
            self.dog.look(now_s)
            if self.lost:
                found.append(now_s)
        return found[:1]


@contextmanager
def in_code(scene: Scene, file: str) -> Iterator[None]:
    """The torch thread is in a line of the user's, whose module has an odd name."""
    code: dict[str, Any] = {"__name__": object()}
    exec(compile("def forward(told, wait): told(); wait()", file, "exec"), code)
    is_there, opened = Event(), Event()
    thread = Thread(target=code["forward"], args=(is_there.set, opened.wait), daemon=True)
    thread.start()
    is_there.wait()
    scene.thread.ident = thread.ident
    yield
    opened.set()


def ended(plan: Plan) -> None:
    plan.is_ended = True


def deserted(plan: Plan) -> None:
    plan.is_attended, plan.is_deserted = False, True


def test_a_plan_whose_coordinator_comes_back_is_not_in_the_way_from_before() -> None:
    scene = Scene()
    first = scene.runs_now()
    assert not scene.lost_at(0.0, 100.0)
    deserted(first)
    scene.waits()
    assert not scene.lost_at(110.0, 111.0)
    first.is_attended, first.is_deserted = True, False
    assert not scene.lost_at(112.0, 5000.0)


@pytest.mark.parametrize("end", [ended, deserted])
@pytest.mark.parametrize(("is_over", "last_s"), [(True, 530.0), (False, 1430.0)])
def test_it_is_given_up_for_others(
    end: Callable[[Plan], None], is_over: bool, last_s: float
) -> None:
    scene = Scene()
    end(scene.runs_now())
    if is_over:
        scene.runs.remove("a")
    assert not scene.lost_at(0.0, 400.0)
    scene.waits()
    assert scene.lost_at(500.0, last_s - 1.0, last_s) == [last_s]


def test_a_plan_that_moves_on_is_waited_for() -> None:
    scene = Scene()
    ended(scene.runs_now())
    scene.runs.clear()
    scene.waits()
    for now_s in range(0, 1000, 20):
        scene.thread.activity.num_moves += 1
        assert not scene.lost_at(float(now_s))
    assert scene.lost_at(1019.0, 1020.0) == [1020.0]


def test_a_plan_that_waits_for_an_ended_one_is_told_soon_what_has_the_thread() -> None:
    scene = Scene()
    first = scene.runs_now()
    scene.thread.activity.text = "training step 3"
    with in_code(scene, "/home/me/m.py"):
        scene.dog.look(0.0)
        scene.dog.look(70.0)
        ended(first)
        waiting, foreign = scene.waits(), scene.waits("c", submitted_by="eve")
        scene.dog.look(100.0)
        scene.dog.look(103.0)
        assert not waiting.stalls
        scene.dog.look(104.0)
        (told,) = waiting.stalls
        where = "training step 3 (m.py, line 1, in forward)"
        assert (told.seconds, told.awaits) == (4.0, f"its torch thread: run a is still at {where}")
        late = scene.waits("d")
        scene.dog.look(104.5)
    assert [plan.stalls[-1].awaits for plan in (foreign, late)] == [
        "another plan that keeps its torch thread",
        told.awaits,
    ]
    assert [len(plan.stalls) for plan in (first, waiting, foreign)] == [1, 1, 1]


def test_what_a_site_has_in_its_thread_is_told_to_nobody() -> None:
    scene = Scene()
    site = Plan("a", admission=object())
    scene.thread.owner = site
    ended(site)
    scene.dog.look(0.0)
    waiting = scene.waits()
    scene.dog.look(1.0)
    scene.dog.look(10.0)
    assert waiting.stalls[-1].awaits == "another plan that keeps its torch thread"


def test_what_is_usual_for_a_run_is_known_to_its_later_plans() -> None:
    scene = Scene()
    scene.runs_now()
    assert not scene.lost_at(0.0)
    scene.thread.activity.num_moves += 1  # a step of 40 s
    scene.stats.num_steps += 1
    assert not scene.lost_at(40.0)
    late = scene.runs_now()
    scene.waits("a")
    assert not scene.lost_at(41.0)
    ended(late)
    assert scene.lost_at(42.0, 100.0, 121.0, 122.0) == [122.0]


def test_odd_code_of_the_users_does_not_end_the_watchdog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def odd(*_: object) -> list[str]:
        raise RuntimeError("a loader without sources")

    scene = Scene()
    plan = scene.runs_now()
    monkeypatch.setattr(traceback, "format_stack", odd)
    with in_code(scene, "/home/me/\udcff\x1b.py"):
        scene.dog.look(0.0)
        scene.dog._try_to_look(70.0)
    (stall,) = plan.stalls
    assert stall.place == "\\xdcff\\x1b.py, line 1, in forward"
    assert scene.dog._has_failed


def test_the_timer_for_a_held_lock_may_have_no_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[dict[str, Any]] = []

    def later(timeout: float, **options: Any) -> None:
        given.append(options)
        raise RuntimeError("sys.stderr is None")

    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    write_stacks_in(600.0)
    assert given == [{"exit": False}]
