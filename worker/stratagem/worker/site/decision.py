"""Decide whether a site takes part in a job, by a pure function of its file, the offer and the
time.

A rule accepts an offer when none of its fields objects. Where no rule accepts it, the refusal names
the nearest rule, the one with the fewest objections, and the first of these with its reason.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Final
from zoneinfo import ZoneInfo

from stratagem.common.code.signatures import is_signed
from stratagem.common.job import JobSpec
from stratagem.common.job.derived import entry_points_by_field
from stratagem.common.privacy.sharing import is_complete, shares_needed
from stratagem.common.strategy import All, Federated, Random
from stratagem.worker.site.file import AcceptRule, SiteFile, moment_text, opening, parse_window

PLANS: Final = ("build", "client_round", "evaluate", "measure_sums")
"""The plans that a federation's coordinator sends to a site; no others are executed."""

LEAST_THRESHOLD: Final = 2 / 3
"""Minimum share of signers: with fewer, two sets of survivors could have enough signers each, and
the difference of their sums would reveal an update."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The request of a coordinator to a site: a job, a plan, and how its updates are protected."""

    job: JobSpec
    plan: str
    submitter: str = ""
    """The submitter, such as "client/maria"; empty if the coordinator does not authenticate."""
    clip_norm: float = 0.0
    """Maximum 2-norm of the plan's update; 0: unlimited."""
    is_masked: bool = False
    """True if the plan requests a masked update."""


@dataclass(frozen=True, slots=True)
class FitsRule:
    """The decision that an offer fits a rule, with the rule's window."""

    number: int
    """The number of the rule, from 1."""
    rule: AcceptRule
    closes: datetime | None = None
    """When the rule's present window closes; None if it does not."""
    closed_text: str = ""
    """A sentence about the next window's opening."""
    closed_s: float = 0.0
    """Seconds from the window's end to the next opening."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The decision that no rule accepts the offer, with the reason."""

    reason: str
    opens: datetime | None = None
    """When the offer would be accepted; None: never, under this file."""


Verdict = FitsRule | Refused


@dataclass(frozen=True, slots=True)
class _Against:
    """An objection of a rule to an offer: the field, and the reason."""

    field: str
    reason: str


def decide(
    site: SiteFile, offer: Offer, at: datetime, spent: Mapping[str, float] | None = None
) -> Verdict:
    """Return the site's decision on an offer. spent: ε of other runs, keyed by data set."""
    name = site.spec.site
    general = next(_against_everywhere(offer), None)
    if general is not None:
        return Refused(f"site {name} refuses: {general}")
    refusals: list[tuple[int, AcceptRule, list[_Against]]] = []
    closed: list[tuple[datetime, str]] = []
    for number, rule in enumerate(site.spec.accept, 1):
        against = list(_against(site, rule, offer, spent or {}))
        if against:
            refusals.append((number, rule, against))
            continue
        verdict = _at(rule, number, at)
        if isinstance(verdict, FitsRule):
            return verdict
        closed.append(verdict)
    if closed:
        opens, text = min(closed, key=lambda reopening: reopening[0].timestamp())
        return Refused(f"site {name} is closed: {text}", opens)
    number, rule, against = min(refusals, key=lambda refusal: len(refusal[2]))
    first = against[0]
    others = ", ".join(mismatch.field for mismatch in against[1:])
    more = f"; against it also: {others}" if others else ""
    which = f"accept[{number - 1}]" if len(site.spec.accept) > 1 else "its rule"
    nearest = f"the nearest of {len(site.spec.accept)} rules, {which}" if refusals[1:] else which
    return Refused(f"site {name} refuses: {nearest}, {first.field}: {first.reason}{more}")


def _at(rule: AcceptRule, number: int, at: datetime) -> FitsRule | tuple[datetime, str]:
    """Return the rule's acceptance if its windows are open, else (time of opening, its text)."""
    if rule.timezone is None:
        return FitsRule(number, rule)
    zone, windows = ZoneInfo(rule.timezone), [parse_window(text) for text in rule.windows]
    now = opening(windows, zone, at)
    if not now.is_open:
        assert now.changes is not None  # every window recurs weekly
        return now.changes, f"opens {moment_text(now.changes, zone)}"
    if now.changes is None:
        return FitsRule(number, rule)
    after = opening(windows, zone, now.changes)
    assert after.changes is not None
    closed_s = (after.changes - now.changes).total_seconds()
    return FitsRule(
        number, rule, now.changes, f"opens {moment_text(after.changes, zone)}", closed_s
    )


def _against_everywhere(offer: Offer) -> Iterator[str]:
    """Yield objections that hold at every site with a file, whatever its rules are."""
    job = offer.job
    if offer.plan not in PLANS:
        yield f"the plan {offer.plan or 'without a name'} is none of {', '.join(PLANS)}"
    if job.data.worker_local is None:
        yield "data: a site's worker reads its own data only; name them as data.worker_local"
    is_clipped = offer.clip_norm > 0 or job.privacy is None or job.privacy.unit == "row"
    if offer.plan == "client_round" and not is_clipped:
        yield "privacy: the plan asks for an update that is not clipped, and the job has privacy"
    is_secure = (
        isinstance(job.strategy, Federated) and job.strategy.options.secure_aggregation is not None
    )
    if is_secure and offer.plan == "client_round" and not offer.is_masked:
        yield "secure_aggregation: the plan asks for an update without masks"
    if job.execution.profiling:
        yield "execution.profiling: a site records nothing of what it does; leave it out"
    if job.recording is not None and job.recording.client_steps:
        yield "recording.client_steps: single steps of a site do not leave it; leave it out"
    if job.evaluation is not None and job.evaluation.predictions:
        yield "evaluation.predictions: outputs of single rows do not leave a site; leave it out"


def _against(
    site: SiteFile, rule: AcceptRule, offer: Offer, spent: Mapping[str, float]
) -> Iterator[_Against]:
    job = offer.job
    data = job.data.worker_local or ""
    if data not in rule.data:
        yield _Against("data", f'"{data}" is not one of {_joined(rule.data)}')
    if rule.submitters is not None and not _matches(offer.submitter, rule.submitters):
        who = f'"{offer.submitter}"' if offer.submitter else "a submitter that is not known"
        yield _Against("submitters", f"{who} is not one of {_joined(rule.submitters)}")
    kind = type(job.strategy).__name__
    if kind not in rule.strategies:
        yield _Against("strategies", f"{kind} is not one of {_joined(rule.strategies)}")
    yield from _against_strategy(rule, job)
    yield from _against_privacy(rule, job, spent.get(data, 0.0))
    yield from _against_code(site, rule, job)
    yield from _against_metrics(rule, offer)


def _against_strategy(rule: AcceptRule, job: JobSpec) -> Iterator[_Against]:
    spec = job.strategy
    if not isinstance(spec, Federated):
        return
    if spec.options.inner is not None:
        yield _Against("strategies", "strategy.options.inner: a site trains with one worker alone")
    if rule.max_rounds is not None and spec.rounds > rule.max_rounds:
        text = f"strategy.rounds {spec.rounds} is more than {rule.max_rounds}"
        yield _Against("max_rounds", text)
    needed = _updates_of_a_round(job, spec)
    if needed < rule.min_clients:
        text = (
            f"a round of the job may be made of {needed} update{'s' if needed > 1 else ''}; "
            f"strategy.options.quorum must ask for at least {rule.min_clients}"
        )
        yield _Against("min_clients", text)


def _updates_of_a_round(job: JobSpec, spec: Federated) -> int:
    """Return the minimum number of updates with which a round of the job can close."""
    quorum = spec.options.quorum
    secure = spec.options.secure_aggregation
    if secure is not None:  # too few survivors fail a round, whatever the quorum
        return shares_needed(secure.threshold, _fewest_selected(job, spec))
    if quorum is None:
        return 1
    selected = _fewest_selected(job, spec)
    if isinstance(quorum, int):
        return min(quorum, selected)
    return max(1, math.ceil(quorum * selected - 1e-9))


def _fewest_selected(job: JobSpec, spec: Federated) -> int:
    """Return the minimum number of clients with which a round can open."""
    roster = spec.options.open_roster
    if roster is None and spec.options.strikes is not None:
        return 1  # the others may be on the bench
    return _selected(job, spec, spec.num_clients if roster is None else roster.min_clients)


def _selected(job: JobSpec, spec: Federated, num_clients: int) -> int:
    """Return the least number of clients that a round selects of num_clients."""
    match spec.client_selection:
        case All():
            return num_clients
        case Random(fraction=fraction) if not _draws_clients(job):
            return max(1, math.floor(fraction * num_clients + 1e-9))
        case _:
            return 1  # clients are drawn independently, or have the tags: that may be one


def _draws_clients(job: JobSpec) -> bool:
    """Return whether each client is selected independently at random."""
    spec = job.privacy
    return spec is not None and spec.unit == "client" and spec.sampling == "poisson"


def epsilon_of(job: JobSpec) -> float | None:
    """Return the maximum ε that a job may spend; None if it gives no such promise."""
    return None if job.privacy is None else job.privacy.target.epsilon


def _not_secure(job: JobSpec) -> str:
    """Return the reason why a deviating coordinator could see single updates; "" if it cannot."""
    strategy = job.strategy
    spec = strategy.options.secure_aggregation if isinstance(strategy, Federated) else None
    if spec is None or not isinstance(strategy, Federated):
        return "the job has no secure_aggregation"
    if not is_complete(strategy.num_clients, spec.degree):
        return "secure_aggregation.degree: the coordinator would draw who shares with whom"
    if spec.threshold < LEAST_THRESHOLD:
        return f"secure_aggregation.threshold {spec.threshold:g} is less than {LEAST_THRESHOLD:g}"
    return ""


def _against_privacy(rule: AcceptRule, job: JobSpec, spent: float) -> Iterator[_Against]:
    if "secure_aggregation" in rule.require and (why := _not_secure(job)):
        yield _Against("require", why)
    if "privacy" in rule.require and job.privacy is None:
        yield _Against("require", "the job has no privacy")
    elif "privacy" in rule.require and job.privacy is not None and job.privacy.noise == "seeded":
        yield _Against("require", "privacy.noise: seeded noise protects nobody")
    if rule.max_epsilon is None:
        return
    epsilon = epsilon_of(job)
    if epsilon is None:
        yield _Against("max_epsilon", "the job names no privacy.target.epsilon")
    elif epsilon + spent > rule.max_epsilon:
        before = f" with {spent:g} of other runs" if spent else ""
        text = f"privacy.target.epsilon {epsilon:g}{before} is more than {rule.max_epsilon:g}"
        yield _Against("max_epsilon", text)


def _against_code(site: SiteFile, rule: AcceptRule, job: JobSpec) -> Iterator[_Against]:
    if job.code is None:
        for field, name in entry_points_by_field(job).items():
            if not _matches(name, rule.entrypoints):
                text = f'{field} "{name}" is not one of {_joined(rule.entrypoints)}'
                yield _Against("entrypoints", text)
        return
    # The names in a bundle are known only when it is here; other names are checked then.
    digest = job.code.digest or ""
    if rule.code == "none":
        yield _Against("code", "the site takes no code from jobs, and the job brings a bundle")
    elif isinstance(rule.code, tuple):
        if f"sha256:{digest}" not in rule.code:
            yield _Against("code", f"the bundle sha256:{digest} is not listed")
    elif job.code.signature is None:
        yield _Against("code", f"the bundle sha256:{digest} is not signed")
    elif not is_signed(digest, job.code.signature, site.keys[rule.code]):
        yield _Against("code", f"no key of the site has signed the bundle sha256:{digest}")


def _against_metrics(rule: AcceptRule, offer: Offer) -> Iterator[_Against]:
    if offer.plan in ("evaluate", "measure_sums") and rule.report == "none":
        yield _Against("report", "none: the site evaluates nothing for others")
    strategy = offer.job.strategy
    if isinstance(strategy, Federated) and strategy.options.q is not None and rule.report == "none":
        yield _Against("report", "none: strategy.options.q needs the loss over the site's rows")
    asked = offer.job.evaluation.metrics if offer.job.evaluation is not None else ()
    others = [name for name in asked if name not in rule.metrics and name != "loss"]
    if others:
        text = f'evaluation.metrics "{others[0]}" is not one of {_joined(rule.metrics)}'
        yield _Against("metrics", text)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return bool(name) and any(fnmatchcase(name, pattern) for pattern in patterns)


def _joined(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"
