"""Each alert rule sees its first event, in recorded scrapes under whatever names, and no other."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.deploy.promtool import Asked, Scene, check, constant, promtool, then
from tests.deploy.recording import PROCESSES, Series, fresh, recorded, samples
from tests.repository import ROOT

RULES = ROOT / "deploy" / "observability" / "alerts.yml"
ALERTS = [
    rule["alert"]
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
]
HERE = "stratagem"
EVENT = 20
"""The minute at which something happens."""

All = dict[Series, str]


def target(process: str, job: str = "kubernetes-pods", deployment: str = HERE) -> All:
    """The recorded scrape of one process, which goes on for hours as it is, and that it is up."""
    of = {"job": job, "instance": f"{deployment}-{process}:9100"}
    found: All = {("up", tuple(of.items())): constant(1.0)}
    for (name, labels), value in recorded(process).items():
        told = dict(labels) | of | {"deployment": deployment}
        found[name, tuple(told.items())] = constant(value)
    return found


def idle() -> All:
    return target("coordinator") | target("worker")


def changed(series: All, values: str, wanted: str, **labels: str) -> All:
    """With other values where a name and labels are."""
    found = [
        (name, told)
        for name, told in series
        if name == wanted and labels.items() <= dict(told).items()
    ]
    assert found, f"nothing tells {wanted} {labels}"
    return series | dict.fromkeys(found, values)


def gone(series: All, process: str, minute: int = EVENT) -> All:
    """A target that is not answered any more."""
    instance = f"{HERE}-{process}:9100"
    return {
        (name, told): (
            values
            if dict(told).get("instance") != instance
            else then(1.0, minute, 0.0)
            if name == "up"
            else then(float(values.partition("+")[0]), minute, None)
        )
        for (name, told), values in series.items()
    }


@dataclass(frozen=True)
class Case:
    """What happens at EVENT, how many minutes later it is told at the latest."""

    make: Callable[[All], All]
    within: int = 1
    also: tuple[str, ...] = ()
    """Other rules that see it, too."""


def sets(
    wanted: str,
    before: float | None,
    after: float,
    rise: float = 0.0,
    within: int = 1,
    **labels: str,
) -> Case:
    values = then(before, EVENT, after, rise)
    return Case(lambda series: changed(series, values, wanted, **labels), within)


def slow(wanted: str) -> Case:
    """Everything that is measured takes longer than all bounds."""

    def make(series: All) -> All:
        top = changed(series, then(0.0, EVENT, 0.0, 60.0), f"{wanted}_bucket", le="+Inf")
        return changed(top, then(0.0, EVENT, 0.0, 60.0), f"{wanted}_count")

    return Case(make, 12)


def second_leader(series: All) -> All:
    held = "stratagem_coordinator_lease_held"
    other = (("deployment", HERE), ("instance", "other:9100"), ("job", "kubernetes-pods"))
    return series | {(held, other): then(None, EVENT, 1.0)}


def rejected(series: All) -> All:
    """A caller's mistake, which the recorded process has not seen yet: its series begins."""
    where = {"deployment": HERE, "instance": f"{HERE}-coordinator:9100", "job": "kubernetes-pods"}
    told = where | {"method": SUBMIT, "error": "LimitError", "code": "X"}
    return series | {(REFUSED, tuple(told.items())): then(None, EVENT, 0.0, 60.0)}


def training(series: All) -> All:
    return changed(series, then(0.0, EVENT, 1.0), "stratagem_coordinator_runs", phase="RUNNING")


def filling(series: All) -> All:
    free = changed(series, then(4e9, EVENT, 4e9, -5e6), DISK, kind="free")
    return changed(free, constant(1e10), DISK, kind="total")


def certificates(series: All, days: float) -> All:
    """An authority of ten years that ends so long after EVENT, and one of a week that is fresh."""
    day = 86_400.0
    for role, ends, starts in (
        ("authority", days * day + EVENT * 60.0, -3650.0 * day),
        ("coordinator", 7.0 * day, 0.0),
    ):
        for name, value in (("expiry", ends), ("start", starts)):
            labels = {"deployment": HERE, "instance": f"{HERE}-coordinator:9100", "role": role}
            key = (f"stratagem_certificate_{name}_seconds", tuple(labels.items()))
            series[key] = constant(value)
    return series


FACTS = "stratagem_coordinator_facts_total"
REFUSED = "stratagem_rpc_refused_total"
UPDATES = "stratagem_coordinator_updates_total"
DISK = "stratagem_coordinator_disk_bytes"
EXECUTIONS = "stratagem_worker_executions_total"
LAG = "stratagem_event_loop_lag_seconds"
SPOOL = "stratagem_coordinator_spool_bytes"
FAILURES = "stratagem_coordinator_effect_failures_total"
SUBMIT = "CoordinatorService/SubmitRun"

COUNTED = {
    "StratagemWorkerLost": partial(sets, FACTS, kind="WorkerLost"),
    "StratagemRunFailed": partial(sets, FACTS, kind="RunFailed"),
    "StratagemUpdatesRejected": partial(sets, UPDATES, outcome="rejected"),
    "StratagemSegmentRefuted": partial(sets, "stratagem_verifications_total", result="refuted_run"),
    "StratagemDefect": partial(sets, REFUSED, method=SUBMIT, error="internal"),
    "StratagemPlanDefect": partial(sets, EXECUTIONS, outcome="defect"),
}
"""What one event is enough for."""

CASES: Mapping[str, Case] = {
    **{alert: make(before=0.0, after=1.0) for alert, make in COUNTED.items()},
    "StratagemNoLeader": sets("stratagem_coordinator_lease_held", 1.0, 0.0, within=2),
    "StratagemTwoLeaders": Case(second_leader, 2),
    "StratagemNotScraped": Case(partial(gone, process="coordinator"), 12, ("StratagemDown",)),
    "StratagemDown": Case(partial(gone, process="worker"), 3),
    "StratagemLeadNotRenewed": sets("stratagem_coordinator_lease_age_seconds", 0.1, 30.0, within=2),
    "StratagemWorkerQuarantined": sets(
        "stratagem_coordinator_workers", 0.0, 1.0, state="quarantined"
    ),
    "StratagemWorkerNotRegistered": sets("stratagem_worker_registered", 1.0, 0.0, within=3),
    "StratagemWorkerStalled": sets("stratagem_worker_torch_stall_seconds", 0.0, 660.0),
    "StratagemHeartbeatsLate": sets(
        "stratagem_coordinator_heartbeat_age_max_seconds", 0.1, 8.0, within=2
    ),
    "StratagemRejections": Case(rejected, 14),
    "StratagemEffectsFail": sets(FAILURES, 0.0, 0.0, 20.0, within=22, effect="RunSegment"),
    "StratagemRunStuck": sets(
        "stratagem_coordinator_run_not_running_max_seconds", 0.0, 0.0, 60.0, within=32
    ),
    "StratagemNoProgress": Case(training, 17),
    "StratagemCertificateEnds": Case(partial(certificates, days=30.0)),
    "StratagemDiskFull": sets(DISK, 8e10, 1e9, within=7, kind="free"),
    "StratagemDiskFillsUp": Case(filling, 200),
    "StratagemSpoolFull": sets(SPOOL, 0.0, 2.7e11, within=7),
    "StratagemEventLoopLag": slow(LAG),
    "StratagemJournalSlow": slow("stratagem_coordinator_journal_append_seconds"),
}


def told(alert: str, case: Case) -> frozenset[tuple[str, str]]:
    nameless = {"StratagemDown"}  # `up` is told by Prometheus itself
    return frozenset((each, "" if each in nameless else HERE) for each in (alert, *case.also))


def first_events() -> Iterator[Scene]:
    """Each rule sees its first event, and nothing before."""
    for alert, case in CASES.items():
        seen = Asked(EVENT + case.within, told(alert, case))
        yield Scene(alert, case.make(idle()), [Asked(EVENT - 1), seen])


def begun_counts() -> Iterator[Scene]:
    """A count that appears with its first event, as of a process that died and came back before
    Prometheus asked it once, is seen and forgotten."""
    for alert, make in COUNTED.items():
        case = make(before=None, after=1.0)
        asked = [Asked(EVENT - 1), Asked(EVENT + 1, told(alert, case)), Asked(EVENT + 11)]
        yield Scene(f"{alert} begins", case.make(idle()), asked)


def deployments() -> Iterator[Scene]:
    """Several are quiet beside each other, alarm for themselves, and none is scraped unheard."""
    others, second = idle(), idle() | target("coordinator", deployment="second")
    for process in ("coordinator", "worker"):
        # The same target of another deployment, and another one's under another job.
        others |= target(process, deployment="second")
        others |= target(process, job="monitoring/stratagem", deployment="third")
    yield Scene("quiet", others, [Asked(minute) for minute in (1, 15, 45, 120, 400)])
    lost = changed(second, then(0.0, EVENT, 1.0), FACTS, kind="WorkerLost", deployment="second")
    alarm = frozenset({("StratagemWorkerLost", "second")})
    yield Scene("of the second", lost, [Asked(EVENT + 1, alarm)])
    nothing: All = {("up", (("job", "node"), ("instance", "a:9100"))): constant(1.0)}
    alarm = frozenset({("StratagemNotScraped", "")})
    yield Scene("nothing scraped", nothing, [Asked(4), Asked(6, alarm)])


@pytest.mark.sweep
def test_each_rule_sees_its_first_event_and_no_other(tmp_path: Path) -> None:
    assert set(CASES) == set(ALERTS)
    check(RULES, [*first_events(), *begun_counts(), *deployments()], tmp_path)
    done = subprocess.run([promtool(), "check", "rules", RULES], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.cluster
@pytest.mark.sweep  # test_observability.py holds rules against what is said to be told
def test_processes_tell_from_their_start_what_was_recorded() -> None:
    """Else the rules are tested on what nobody tells: `python -m tests.deploy.recording`."""
    wanted = {process: recorded(process) for process in PROCESSES}
    for process, text in fresh(wanted).items():
        assert not set(wanted[process]) - set(samples(text)), process
    assert set(PROCESSES) == {path.stem for path in (Path(__file__).parent / "scrapes").iterdir()}
