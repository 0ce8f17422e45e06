"""What a site says to an offer: a pure function, for each key of a rule and beyond."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.code.signatures import make_keys, sign
from stratagem.common.job import JobSpec
from stratagem.worker.site.decision import FitsRule, Offer, Refused, decide
from tests.worker.site.jobs import ANY, DIGEST, offered, site_of

pytestmark = pytest.mark.core

MONDAY_NOON = datetime(2026, 11, 23, 11, 0, tzinfo=UTC)  # 12:00 in Vienna
NIGHTS = f'{ANY}\nwindows = ["Mon-Fri 19:00-06:00"]\ntimezone = "Europe/Vienna"'


def said(
    folder: Path,
    rule: str,
    job: JobSpec | None = None,
    *,
    plan: str = "client_round",
    submitter: str = "",
    spent: dict[str, float] | None = None,
    clip_norm: float = 0.0,
) -> str:
    """The field and the reason for which a site of one rule refuses; "" where it accepts."""
    offer = Offer(job or offered(), plan, submitter, clip_norm)
    verdict = decide(site_of(folder, rule), offer, MONDAY_NOON, spent)
    if isinstance(verdict, FitsRule):
        assert verdict.number == 1
        return ""
    return verdict.reason.removeprefix("site st-anna refuses: ").removeprefix("its rule, ")


CODE: dict[str, Any] = {"code": {"digest": DIGEST}}


@pytest.mark.parametrize(
    ("rule", "changes", "reason"),
    [
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
        (f"{ANY}\nmax_rounds = 10", {}, ""),
        (f"{ANY}\nmax_rounds = 9", {}, "max_rounds: strategy.rounds 10 is more than 9"),
        (f"{ANY}\nmin_clients = 1", {}, ""),
        (
            f"{ANY}\nmin_clients = 3",
            {},
            "min_clients: a round of the job may be made of 1 update; strategy.options.quorum must "
            "ask for at least 3",
        ),
        (f"{ANY}\nmin_clients = 3", {"options": {"quorum": 3}}, ""),
        (f"{ANY}\nmin_clients = 4", {"options": {"quorum": 0.7}}, ""),  # 3.5 of 5
        (
            f"{ANY}\nmin_clients = 5",
            {"options": {"quorum": 0.8}},
            "min_clients: a round of the job may be made of 4 updates; strategy.options.quorum "
            "must ask for at least 5",
        ),
        (
            f"{ANY}\nmin_clients = 3",
            {
                "strategy": {"client_selection": {"method": "Random", "fraction": 0.4}},
                "options": {"quorum": 5},
            },
            "min_clients: a round of the job may be made of 2 updates; strategy.options.quorum "
            "must ask for at least 3",
        ),
        (
            f"{ANY}\nmin_clients = 2",
            {
                "strategy": {
                    "client_selection": {"method": "ByCapability", "required_tags": ["gpu"]}
                },
                "options": {"quorum": 5},
            },
            "min_clients: a round of the job may be made of 1 update; strategy.options.quorum must "
            "ask for at least 2",
        ),
        (f'{ANY}\nrequire = ["privacy"]', {}, "require: the job has no privacy"),
        (
            f"{ANY}\nmax_epsilon = 8.0",
            {},
            "max_epsilon: the job names no privacy.target.epsilon",
        ),
        (ANY, CODE, "code: the site takes no code from jobs, and the job brings a bundle"),
        (f'{ANY}\ncode = ["sha256:{DIGEST}"]', CODE, ""),
        (f'data = ["xray"]\ncode = ["sha256:{DIGEST}"]', CODE, ""),  # names are asked about later
        (
            f'{ANY}\ncode = ["sha256:{"b" * 64}"]',
            CODE,
            f"code: the bundle sha256:{DIGEST} is not listed",
        ),
        (
            ANY,
            {"evaluation": {"split": "test", "metrics": ["accuracy"]}},
            'metrics: evaluation.metrics "accuracy" is not one of nothing',
        ),
        (
            f'{ANY}\nmetrics = ["accuracy"]',
            {"evaluation": {"split": "test", "metrics": ["accuracy"]}},
            "",
        ),
    ],
)
def test_each_field_of_a_rule(
    tmp_path: Path, rule: str, changes: dict[str, Any], reason: str
) -> None:
    assert said(tmp_path, rule, offered(**changes)) == reason


@pytest.mark.parametrize(
    ("submitters", "submitter", "reason"),
    [
        ('["client/maria"]', "client/maria", ""),
        ('["client/*", "token/ci"]', "token/ci", ""),
        ('["client/maria"]', "client/eve", '"client/eve" is not one of client/maria'),
        ('["client/maria"]', "client/maria2", '"client/maria2" is not one of client/maria'),
        ('["*"]', "", "a submitter that is not known is not one of *"),
    ],
)
def test_submitters(tmp_path: Path, submitters: str, submitter: str, reason: str) -> None:
    told = said(tmp_path, f"{ANY}\nsubmitters = {submitters}", submitter=submitter)
    assert told == (f"submitters: {reason}" if reason else "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"data": {"entrypoint": "tests.userland.data:classes"}},
            "data: a site's worker reads its own data only; name them as data.worker_local",
        ),
        (
            {"execution": {"profiling": True}},
            "execution.profiling: a site records nothing of what it does; leave it out",
        ),
        (
            {"recording": {"client_steps": True}},
            "recording.client_steps: single steps of a site do not leave it; leave it out",
        ),
    ],
)
def test_what_no_rule_can_allow(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    assert said(tmp_path, ANY, offered(**changes)) == reason


@pytest.mark.parametrize("plan", ["train", "measure", "show", ""])
def test_plans_of_other_strategies_are_refused(tmp_path: Path, plan: str) -> None:
    told = said(tmp_path, ANY, plan=plan)
    plans = "build, client_round, evaluate, measure_sums"
    assert told == f"the plan {plan or 'without a name'} is none of {plans}"


def test_silos_are_refused(tmp_path: Path) -> None:
    job = offered(options={"inner": {"type": "Local"}}, steps=None)
    assert "strategy.options.inner: a site trains with one worker alone" in said(tmp_path, ANY, job)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("build", ""),
        ("client_round", ""),
        ("evaluate", "report: none: the site evaluates nothing for others"),
    ],
)
def test_a_site_that_reports_nothing_still_trains(tmp_path: Path, plan: str, reason: str) -> None:
    assert said(tmp_path, f'{ANY}\nreport = "none"', plan=plan) == reason


def test_a_site_that_reports_nothing_has_no_part_in_weighing_by_losses(tmp_path: Path) -> None:
    fair = offered(options={"q": 0.2})
    reason = "report: none: strategy.options.q needs the loss over the site's rows"
    assert said(tmp_path, f'{ANY}\nreport = "none"', fair) == reason
    assert said(tmp_path, ANY, fair) == ""


def test_signed_bundles(tmp_path: Path) -> None:
    make_keys(tmp_path / "theirs", tmp_path / "keys.pem")
    make_keys(tmp_path / "other", tmp_path / "other.pem")
    rule = f'{ANY}\ncode = "signed:keys.pem"'
    right = offered(code={"digest": DIGEST, "signature": sign(DIGEST, tmp_path / "theirs")})
    wrong = offered(code={"digest": DIGEST, "signature": sign(DIGEST, tmp_path / "other")})
    assert said(tmp_path, rule, right) == ""
    no_key = f"code: no key of the site has signed the bundle sha256:{DIGEST}"
    assert said(tmp_path, rule, wrong) == no_key
    assert (
        said(tmp_path, rule, offered(**CODE)) == f"code: the bundle sha256:{DIGEST} is not signed"
    )


# ---- which rule ----


def test_the_first_rule_that_fits_counts(tmp_path: Path) -> None:
    site = site_of(tmp_path, ANY.replace("xray", "ct"), ANY, ANY)
    verdict = decide(site, Offer(offered(), "build"), MONDAY_NOON)
    assert isinstance(verdict, FitsRule)
    assert verdict.number == 2


def test_the_nearest_rule_is_named_with_its_first_field(tmp_path: Path) -> None:
    far = 'data = ["ct"]\nmax_rounds = 3'
    near = f"{ANY}\nmax_rounds = 3\nmin_clients = 4"
    verdict = decide(site_of(tmp_path, far, near), Offer(offered(), "build"), MONDAY_NOON)
    assert verdict == Refused(
        "site st-anna refuses: the nearest of 2 rules, accept[1], max_rounds: strategy.rounds 10 "
        "is more than 3; against it also: min_clients"
    )


# ---- hours ----


@pytest.mark.parametrize(
    ("at", "opens"),
    [
        ("2026-11-23T11:00", "opens Mon 19:00 Europe/Vienna"),
        ("2026-11-24T05:00", "opens Tue 19:00 Europe/Vienna"),
        ("2026-11-28T12:00", "opens Mon 19:00 Europe/Vienna"),
    ],
)
def test_a_site_is_closed_outside_its_windows(tmp_path: Path, at: str, opens: str) -> None:
    now = datetime.fromisoformat(at).replace(tzinfo=UTC)
    verdict = decide(site_of(tmp_path, NIGHTS), Offer(offered(), "client_round"), now)
    assert isinstance(verdict, Refused)
    assert verdict.reason == f"site st-anna is closed: {opens}"
    assert verdict.opens is not None


def test_an_acceptance_ends_with_the_window(tmp_path: Path) -> None:
    now = datetime(2026, 11, 23, 20, 0, tzinfo=UTC)
    verdict = decide(site_of(tmp_path, NIGHTS), Offer(offered(), "client_round"), now)
    assert isinstance(verdict, FitsRule)
    assert verdict.closes is not None
    assert (verdict.closes - now).total_seconds() == 9 * 3600  # till six in Vienna
    assert verdict.closed_text == "opens Tue 19:00 Europe/Vienna"


def test_a_closed_rule_that_fits_is_told_before_rules_that_do_not(tmp_path: Path) -> None:
    site = site_of(tmp_path, f"{ANY}\nmax_rounds = 3", NIGHTS)
    verdict = decide(site, Offer(offered(), "build"), MONDAY_NOON)
    assert isinstance(verdict, Refused)
    assert verdict.reason == "site st-anna is closed: opens Mon 19:00 Europe/Vienna"


def test_the_earliest_opening_of_all_that_fit_is_told(tmp_path: Path) -> None:
    afternoons = NIGHTS.replace("19:00-06:00", "14:00-15:00")
    site = site_of(tmp_path, NIGHTS, afternoons)
    verdict = decide(site, Offer(offered(), "build"), MONDAY_NOON)
    assert isinstance(verdict, Refused)
    assert verdict.reason.endswith("opens Mon 14:00 Europe/Vienna")


def test_an_open_rule_counts_while_another_one_is_closed(tmp_path: Path) -> None:
    verdict = decide(site_of(tmp_path, NIGHTS, ANY), Offer(offered(), "build"), MONDAY_NOON)
    assert isinstance(verdict, FitsRule)
    assert (verdict.number, verdict.closes) == (2, None)


# ---- privacy ----


def private(epsilon: float | None, noise: str = "secret", **changes: Any) -> JobSpec:
    """A job with differential privacy of its clients."""
    target = {"epsilon": epsilon, "delta": 1e-5} if epsilon else {"delta": 1e-5}
    privacy = {"clip": {"norm": 1.0}, "noise_multiplier": 1.0, "target": target, "noise": noise}
    return offered(privacy=privacy, **changes)


@pytest.mark.parametrize(
    ("epsilon", "spent", "reason"),
    [
        (3.0, {}, ""),
        (3.0, {"xray": 5.0}, ""),
        (3.0, {"ct": 50.0}, ""),
        (
            3.0,
            {"xray": 5.5},
            "privacy.target.epsilon 3 with 5.5 of other runs is more than 8",
        ),
        (9.0, {}, "privacy.target.epsilon 9 is more than 8"),
        (None, {}, "the job names no privacy.target.epsilon"),
    ],
)
def test_epsilon_is_summed_over_runs(
    tmp_path: Path, epsilon: float | None, spent: dict[str, float], reason: str
) -> None:
    rule = f'{ANY}\nrequire = ["privacy"]\nmax_epsilon = 8.0'
    told = said(tmp_path, rule, private(epsilon), spent=spent, clip_norm=1.0)
    assert told == (f"max_epsilon: {reason}" if reason else "")


def test_noise_that_everybody_can_compute_is_no_privacy(tmp_path: Path) -> None:
    told = said(
        tmp_path, f'{ANY}\nrequire = ["privacy"]', private(1.0, noise="seeded"), clip_norm=1.0
    )
    assert told == "require: privacy.noise: seeded noise protects nobody"


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, float("nan")])
def test_a_private_job_gets_no_update_that_is_not_clipped(tmp_path: Path, clip_norm: float) -> None:
    told = said(tmp_path, ANY, private(1.0), clip_norm=clip_norm)
    assert told.startswith("privacy: the plan asks for an update that is not clipped")
    assert said(tmp_path, ANY, private(1.0), clip_norm=clip_norm, plan="build") == ""


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
    job = offered(options=options)
    assert said(tmp_path, f"{ANY}\nmin_clients = {needed}", job) == ""
    more = said(tmp_path, f"{ANY}\nmin_clients = {needed + 1}", job)
    assert more.startswith(f"min_clients: a round of the job may be made of {needed} update")


def test_clients_that_are_drawn_one_by_one_may_be_few(tmp_path: Path) -> None:
    drawn = {"client_selection": {"method": "Random", "fraction": 0.8}}
    job = private(1.0, strategy=drawn, options={"quorum": 3})
    told = said(tmp_path, f"{ANY}\nmin_clients = 2", job, clip_norm=1.0)
    assert told.startswith("min_clients: a round of the job may be made of 1 update")


def rows(**privacy: Any) -> JobSpec:
    """A job that protects each row, and draws a part of the clients in the open."""
    section = {"unit": "row", "clip": {"norm": 1.0}, "noise_multiplier": 1.0, **privacy}
    section = {"target": {"epsilon": 3.0, "delta": 1e-5}, **section}
    return offered(privacy=section)


def test_protected_rows_are_privacy_without_a_clipped_update(
    tmp_path: Path,
) -> None:
    rule = f'{ANY}\nrequire = ["privacy"]\nmax_epsilon = 8.0'
    assert said(tmp_path, rule, rows()) == ""
    assert said(tmp_path, rule, rows(), spent={"xray": 4.9}) == ""
    told = said(tmp_path, rule, rows(), spent={"xray": 5.1})
    assert told == "max_epsilon: privacy.target.epsilon 3 with 5.1 of other runs is more than 8"
    told = said(tmp_path, rule, rows(noise="seeded"))
    assert told == "require: privacy.noise: seeded noise protects nobody"
    told = said(tmp_path, rule, rows(target={"delta": 1e-5}))
    assert told == "max_epsilon: the job names no privacy.target.epsilon"
