"""What a site says to an offer: a pure function, for each key of a rule and beyond."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.code.signatures import make_keys, sign
from stratagem.worker.site.decision import FitsRule, Offer, Refused, decide
from tests.worker.site.jobs import ANY, DIGEST, NIGHTS, PEERS, offered, site_of

pytestmark = pytest.mark.core

MONDAY_NOON = datetime(2026, 11, 23, 11, 0, tzinfo=UTC)  # 12:00 in Vienna
PRIVATE = 'require = ["privacy"]\nmax_epsilon = 8.0'
MASKED = 'require = ["secure_aggregation"]'
CODE: dict[str, Any] = {"code": {"digest": DIGEST}}
ACCURACY: dict[str, Any] = {"evaluation": {"split": "test", "metrics": ["accuracy"]}}
BY_TAG = {"client_selection": {"method": "ByCapability", "required_tags": ["gpu"]}}


def drawn(fraction: float) -> dict[str, Any]:
    return {"client_selection": {"method": "Random", "fraction": fraction}}


def private(epsilon: float | None = 1.0, **changes: Any) -> dict[str, Any]:
    """A section of differential privacy; its unit is a client unless it is said to be a row."""
    target = {"epsilon": epsilon, "delta": 1e-5} if epsilon else {"delta": 1e-5}
    section = {"clip": {"norm": 1.0}, "noise_multiplier": 1.0, "target": target}
    is_of_rows = changes.get("unit") == "row"
    return {"privacy": section | ({} if is_of_rows else {"noise": "secret"}) | changes}


def few(made_of: int, needed: int) -> str:
    updates = f"{made_of} update{'s' * (made_of > 1)}"
    return (
        f"min_clients: a round of the job may be made of {updates}; strategy.options.quorum must "
        f"ask for at least {needed}"
    )


def said(
    folder: Path, rule: str, changes: dict[str, Any], plan: str = "client_round", **asked: Any
) -> str:
    """The field and the reason for which a site of one rule refuses; "" where it accepts."""
    spent = asked.pop("spent", None)
    offer = Offer(offered(**changes), plan, **asked)
    verdict = decide(site_of(folder, rule, head=PEERS), offer, MONDAY_NOON, spent)
    if isinstance(verdict, FitsRule):
        assert verdict.number == 1
        return ""
    return verdict.reason.removeprefix("site st-anna refuses: ").removeprefix("its rule, ")


WHOLE_RULES: list[tuple[str, dict[str, Any], str]] = [
    (ANY, {}, ""),
    (ANY.replace("xray", "ct"), {}, 'data: "xray" is not one of ct'),
    ('data = ["ct", "xray"]\nentrypoints = ["*"]', {}, ""),
    (
        'data = ["xray"]',
        {},
        'entrypoints: model.entrypoint "tests.userland.models:mlp" is not one of nothing',
    ),
    (
        ANY.replace("userland.*", "userland.models"),
        {"loss": "tests.userland.losses:mean_loss"},
        'entrypoints: loss.entrypoint "tests.userland.losses:mean_loss" is not one of '
        "tests.userland.models:*",
    ),
    (f'data = ["xray"]\ncode = ["sha256:{DIGEST}"]', CODE, ""),  # names are asked about later
]
FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("max_rounds = 10", {}, ""),
    ("max_rounds = 9", {}, "max_rounds: strategy.rounds 10 is more than 9"),
    ("min_clients = 1", {}, ""),
    ("min_clients = 3", {}, few(1, 3)),
    ("min_clients = 3", {"options": {"quorum": 3}}, ""),
    ("min_clients = 4", {"options": {"quorum": 0.7}}, ""),  # 3.5 of 5
    ("min_clients = 5", {"options": {"quorum": 0.8}}, few(4, 5)),
    ("min_clients = 3", {"strategy": drawn(0.4), "options": {"quorum": 5}}, few(2, 3)),
    ("min_clients = 2", {"strategy": BY_TAG, "options": {"quorum": 5}}, few(1, 2)),
    # Few survivors make no round, whatever the quorum.
    ("min_clients = 4", {"options": {"secure_aggregation": {}}}, ""),
    ("min_clients = 5", {"options": {"secure_aggregation": {}}}, few(4, 5)),
    ('require = ["privacy"]', {}, "require: the job has no privacy"),
    ("max_epsilon = 8.0", {}, "max_epsilon: the job names no privacy.target.epsilon"),
    ("", CODE, "code: the site takes no code from jobs, and the job brings a bundle"),
    (f'code = ["sha256:{DIGEST}"]', CODE, ""),
    (f'code = ["sha256:{"b" * 64}"]', CODE, f"code: the bundle sha256:{DIGEST} is not listed"),
    ("", ACCURACY, 'metrics: evaluation.metrics "accuracy" is not one of nothing'),
    ('metrics = ["accuracy"]', ACCURACY, ""),
    (
        "",
        {"data": {"entrypoint": "tests.userland.data:classes"}},
        "data: a site's worker reads its own data only; name them as data.worker_local",
    ),
    (
        "",
        {"execution": {"profiling": True}},
        "execution.profiling: a site records nothing of what it does; leave it out",
    ),
    (
        "",
        {"recording": {"client_steps": True}},
        "recording.client_steps: single steps of a site do not leave it; leave it out",
    ),
    # Weighing by losses needs what such a site does not report.
    ('report = "none"', {"options": {"q": 0.2}}, "report: none: strategy.options.q needs the loss"),
    ("", {"options": {"q": 0.2}}, ""),
    (
        "",
        {"options": {"inner": {"type": "Local"}}, "steps": None},
        "strategies: strategy.options.inner: a site trains with one worker alone",
    ),
    # Rows that are protected are privacy without a clipped update.
    (PRIVATE, private(3.0, unit="row"), ""),
    (
        PRIVATE,
        private(3.0, unit="row", noise="seeded"),
        "require: privacy.noise: seeded noise protects nobody",
    ),
    (
        PRIVATE,
        private(None, unit="row"),
        "max_epsilon: the job names no privacy.target.epsilon",
    ),
    (MASKED, {}, "require: the job has no secure_aggregation"),
    (
        MASKED,
        {"options": {"secure_aggregation": {"threshold": 0.6}}},
        "require: secure_aggregation.threshold 0.6 is less than 0.666667",
    ),
    (
        MASKED,
        {"options": {"secure_aggregation": {"degree": 2}}},
        "require: secure_aggregation.degree: the coordinator would draw who shares with whom",
    ),
]


@pytest.mark.parametrize(
    ("rule", "changes", "reason"),
    [*WHOLE_RULES, *((f"{ANY}\n{field}", *others) for field, *others in FIELDS)],
)
def test_the_fields_of_rules(
    tmp_path: Path, rule: str, changes: dict[str, Any], reason: str
) -> None:
    told = said(tmp_path, rule, changes, is_masked=True)
    assert told.startswith(reason)
    assert bool(told) == bool(reason)


CLIPPED = {"clip_norm": 1.0}
NOT_CLIPPED = "privacy: the plan asks for an update that is not clipped"
TOO_MUCH = "max_epsilon: privacy.target.epsilon"


@pytest.mark.parametrize(
    ("field", "changes", "asked", "reason"),
    [
        *(
            (f"submitters = {names}", {}, {"submitter": who}, reason and f"submitters: {reason}")
            for names, who, reason in (
                ('["client/maria"]', "client/maria", ""),
                ('["client/*", "token/ci"]', "token/ci", ""),
                ('["client/maria"]', "client/eve", '"client/eve" is not one of client/maria'),
                ('["client/maria"]', "client/maria2", '"client/maria2" is not one of client/maria'),
                ('["*"]', "", "a submitter that is not known is not one of *"),
            )
        ),
        *(
            ("", {}, {"plan": plan}, f"the plan {plan or 'without a name'} is none of build, clien")
            for plan in ("train", "measure", "show", "")
        ),
        ('report = "none"', {}, {"plan": "build"}, ""),
        ('report = "none"', {}, {}, ""),
        ('report = "none"', {}, {"plan": "evaluate"}, "report: none: the site evaluates nothing"),
        # Epsilon is summed over the runs on the same data.
        (PRIVATE, private(3.0), CLIPPED, ""),
        (PRIVATE, private(3.0), CLIPPED | {"spent": {"xray": 5.0}}, ""),
        (PRIVATE, private(3.0), CLIPPED | {"spent": {"ct": 50.0}}, ""),
        (
            PRIVATE,
            private(3.0),
            CLIPPED | {"spent": {"xray": 5.5}},
            f"{TOO_MUCH} 3 with 5.5 of other runs is more than 8",
        ),
        (PRIVATE, private(9.0), CLIPPED, f"{TOO_MUCH} 9 is more than 8"),
        (PRIVATE, private(None), CLIPPED, "max_epsilon: the job names no privacy.target.epsilon"),
        (PRIVATE, private(3.0, unit="row"), {"spent": {"xray": 4.9}}, ""),
        (
            PRIVATE,
            private(3.0, unit="row"),
            {"spent": {"xray": 5.1}},
            f"{TOO_MUCH} 3 with 5.1 of other runs is more than 8",
        ),
        # Noise that everybody can compute is no privacy.
        (
            'require = ["privacy"]',
            private(noise="seeded"),
            CLIPPED,
            "require: privacy.noise: seeded noise protects nobody",
        ),
        *(("", private(), {"clip_norm": norm}, NOT_CLIPPED) for norm in (0.0, -1.0, float("nan"))),
        *(("", private(), {"clip_norm": n, "plan": "build"}, "") for n in (0.0, float("nan"))),
        # Clients that are drawn one by one may be few.
        (
            "min_clients = 2",
            {**private(), "strategy": drawn(0.8), "options": {"quorum": 3}},
            CLIPPED,
            few(1, 2),
        ),
        (
            "",
            {"options": {"secure_aggregation": {}}},
            {"is_masked": False},
            "secure_aggregation: the plan asks for an update without masks",
        ),
    ],
)
def test_what_a_plan_asks_for(
    tmp_path: Path, field: str, changes: dict[str, Any], asked: dict[str, Any], reason: str
) -> None:
    told = said(tmp_path, f"{ANY}\n{field}", changes, **asked)
    assert told.startswith(reason)
    assert bool(told) == bool(reason)


def test_signed_bundles(tmp_path: Path) -> None:
    make_keys(tmp_path / "theirs", tmp_path / "keys.pem")
    make_keys(tmp_path / "other", tmp_path / "other.pem")
    rule, bundle = f'{ANY}\ncode = "signed:keys.pem"', f"the bundle sha256:{DIGEST}"
    for key, reason in (
        ("theirs", ""),
        ("other", f"code: no key of the site has signed {bundle}"),
        ("", f"code: {bundle} is not signed"),
    ):
        signature = {"signature": sign(DIGEST, tmp_path / key)} if key else {}
        assert said(tmp_path, rule, {"code": {"digest": DIGEST, **signature}}) == reason


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"quorum": 5, "roster": {"open": True, "min_clients": 5}}, 5),
        ({"quorum": 3, "roster": {"open": True, "min_clients": 3}}, 3),
        ({"quorum": 1.0, "roster": {"open": True, "min_clients": 4}}, 4),
        ({"quorum": 5, "strikes": {"limit": 3, "bench_rounds": 5}}, 1),  # all others are benched
        ({"roster": {"open": True, "min_clients": 4}}, 1),
    ],
)
def test_updates_that_a_round_needs(tmp_path: Path, options: Any, needed: int) -> None:
    changes = {"options": options}
    assert said(tmp_path, f"{ANY}\nmin_clients = {needed}", changes) == ""
    assert said(tmp_path, f"{ANY}\nmin_clients = {needed + 1}", changes) == few(needed, needed + 1)


# ---- which rule, and hours ----


def test_the_first_rule_that_fits_counts_and_else_the_nearest_is_named(tmp_path: Path) -> None:
    offer = Offer(offered(), "build")
    verdict = decide(site_of(tmp_path, ANY.replace("xray", "ct"), ANY, ANY), offer, MONDAY_NOON)
    assert isinstance(verdict, FitsRule)
    assert verdict.number == 2
    far, near = 'data = ["ct"]\nmax_rounds = 3', f"{ANY}\nmax_rounds = 3\nmin_clients = 4"
    assert decide(site_of(tmp_path, far, near), offer, MONDAY_NOON) == Refused(
        "site st-anna refuses: the nearest of 2 rules, accept[1], max_rounds: strategy.rounds 10 "
        "is more than 3; against it also: min_clients"
    )


AFTERNOONS = NIGHTS.replace("19:00-06:00", "14:00-15:00")


@pytest.mark.parametrize(
    ("rules", "at", "opens"),
    [
        ([NIGHTS], "2026-11-23T11:00", "Mon 19:00"),
        ([NIGHTS], "2026-11-24T05:00", "Tue 19:00"),
        ([NIGHTS], "2026-11-28T12:00", "Mon 19:00"),
        ([f"{ANY}\nmax_rounds = 3", NIGHTS], "2026-11-23T11:00", "Mon 19:00"),  # it fits
        ([NIGHTS, AFTERNOONS], "2026-11-23T11:00", "Mon 14:00"),  # the earliest of all that fit
    ],
)
def test_a_site_is_closed_in_between(tmp_path: Path, rules: list[str], at: str, opens: str) -> None:
    now = datetime.fromisoformat(at).replace(tzinfo=UTC)
    verdict = decide(site_of(tmp_path, *rules), Offer(offered(), "client_round"), now)
    assert isinstance(verdict, Refused)
    assert verdict.reason == f"site st-anna is closed: opens {opens} Europe/Vienna"
    assert verdict.opens is not None


def test_an_acceptance_ends_with_the_window_of_the_first_open_rule(
    tmp_path: Path,
) -> None:
    now, offer = datetime(2026, 11, 23, 20, 0, tzinfo=UTC), Offer(offered(), "client_round")
    verdict = decide(site_of(tmp_path, NIGHTS), offer, now)
    assert isinstance(verdict, FitsRule)
    assert verdict.closes is not None
    assert (verdict.closes - now).total_seconds() == 9 * 3600  # till six in Vienna
    assert verdict.closed_text == "opens Tue 19:00 Europe/Vienna"
    verdict = decide(site_of(tmp_path, NIGHTS, ANY), offer, MONDAY_NOON)
    assert isinstance(verdict, FitsRule)
    assert (verdict.number, verdict.closes) == (2, None)
