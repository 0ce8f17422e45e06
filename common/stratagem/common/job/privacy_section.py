"""The section `privacy`: differential privacy of the clients of a federation, or of their rows.

Checks itself, and what a job with it may not say besides. Knows no accountant and no noise.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from stratagem.common.base.errors import Violation
from stratagem.common.job.privacy.row_rules import check_rows_protected
from stratagem.common.privacy.adaptive_clipping import sum_noise_multiplier
from stratagem.common.schema.document import Section
from stratagem.common.schema.field_types import Positive
from stratagem.common.schema.rules import rule
from stratagem.common.strategy import ByCapability, Federated, Random

if TYPE_CHECKING:  # which has this section
    from stratagem.common.job.spec import JobSpec

BelowOne = Annotated[float, Field(gt=0, lt=1)]


class AdaptiveClipSpec(Section):
    """How the clipping norm follows the norms of the updates: toward their `quantile`, by a factor
    of e^(rate · distance) in a round. See common/privacy/adaptive_clipping.py."""

    quantile: BelowOne = 0.5
    rate: Positive = 0.2


class ClipSpec(Section):
    """The 2-norm that a client's change, or a row's gradient, has at most, all its numbers taken as
    one vector; with `adaptive`, of the first round."""

    norm: Positive
    adaptive: AdaptiveClipSpec | None = None


class PrivacyTargetSpec(Section):
    """The budget: the run ends before the round that would spend more than epsilon at delta, and a
    client whose rows are protected takes part in no such round; without epsilon, what is spent is
    only counted."""

    epsilon: Positive | None = None
    delta: BelowOne


class PrivacySpec(Section):
    """Settings of differential privacy.

    unit: what is protected, a "client" with all its rows, by noise of the coordinator; or each
    "row", by noise in each step of its client (DP-SGD). noise_multiplier: the noise's standard
    deviation over the clipping norm; None: the least with which all rounds stay within the target.
    sampling: "poisson" draws each client by itself and secretly, with the probability
    client_selection.fraction, and counts on that; "fixed" draws as without privacy, which everybody
    can foresee, and counts each client in every round. Rows are drawn by "poisson" with the
    probability batch_size / rows of the client. noise: "seeded" draws noise that everybody can
    compute, for tests; it protects nobody.
    """

    unit: Literal["client", "row"] = "client"
    clip: ClipSpec
    noise_multiplier: Annotated[float, Field(ge=0.1, le=1000)] | None = None
    target: PrivacyTargetSpec
    sampling: Literal["poisson", "fixed"] = "poisson"
    noise: Literal["secret", "seeded"] = "secret"

    @rule
    def _says_how_much(self) -> Iterator[Violation]:
        if self.noise_multiplier is None and self.target.epsilon is None:
            text = "missing; without it, noise_multiplier says how much noise there is, for "
            yield Violation("target.epsilon", f"{text}example epsilon: 8")

    def sampling_rate(self, strategy: Federated) -> float:
        """Return the probability that the accountant may count on; 1 where there is no secret."""
        selection = strategy.client_selection
        is_drawn = self.sampling == "poisson" and isinstance(selection, Random)
        return selection.fraction if is_drawn and isinstance(selection, Random) else 1.0


def check_privacy(job: "JobSpec") -> Iterator[Violation]:
    """Yield what does not go together with the section `privacy` of a job."""
    spec, strategy = job.privacy, job.strategy
    if spec is None:
        return
    if not isinstance(strategy, Federated):
        kind = type(strategy).__name__
        yield Violation("privacy", f"belongs to Federated only; the strategy is {kind}")
        return
    if spec.unit == "row":
        yield from check_rows_protected(job, strategy)
    else:
        yield from _of_the_rounds(spec, strategy)
        if job.compression is not None and job.compression.codec != "none":
            text = "is not possible with privacy: what a codec makes of a clipped change may be "
            yield Violation("compression", f"{text}longer")
    if job.evaluation is not None and job.data.worker_local is not None:
        text = (
            "is not possible with privacy and data.worker_local: each client's numbers would be "
            "published without noise; evaluate rows that all may see in a run of its own"
        )
        yield Violation("evaluation", text)
    if job.recording is not None and job.recording.client_steps:
        text = "is not possible with privacy: the steps of single clients are not published"
        yield Violation("recording.client_steps", text)
    if job.initial is not None and job.initial.resume:
        text = "is not possible with privacy: what that run has spent is not known to this one"
        yield Violation("initial.resume", text)


def _of_the_rounds(spec: PrivacySpec, strategy: Federated) -> Iterator[Violation]:
    options = strategy.options
    if options.late_updates != "refuse":
        text = "is not possible with privacy: a late client would count in a round that it was "
        yield Violation("strategy.options.late_updates", f"{text}not drawn for")
    if options.over_select:
        text = "is not possible with privacy: who is fast would decide who counts"
        yield Violation("strategy.options.over_select", text)
    if options.open_roster is not None:
        text = "is not possible with privacy: of how many clients the draw is must not change"
        yield Violation("strategy.options.roster.open", text)
    if options.strikes is not None:
        text = "is not possible with privacy: how clients fail would decide who can be drawn"
        yield Violation("strategy.options.strikes", text)
    if options.robust is not None:
        text = "is not possible with privacy: what one client changes in it is not bounded as a sum"
        yield Violation("strategy.options.robust", text)
    if options.regions is not None:
        text = "is not possible with privacy: the noise is that of one sum"
        yield Violation("strategy.options.regions", text)
    if options.inner is not None:
        text = "is not possible with privacy: a silo's change is not clipped as one"
        yield Violation("strategy.options.inner", text)
    if spec.clip.adaptive is not None and spec.noise_multiplier is not None:
        if isinstance(strategy.client_selection, ByCapability):
            return  # how many clients have the tags is known when the roster is
        num_expected = spec.sampling_rate(strategy) * strategy.num_clients
        if sum_noise_multiplier(spec.noise_multiplier, num_expected) is None:
            yield Violation("privacy.clip.adaptive", too_few(spec.noise_multiplier, num_expected))


def too_few(noise_multiplier: float, num_expected: float) -> str:
    """Return why clipping cannot adapt to so few clients."""
    return (
        f"needs more than {10 * noise_multiplier:g} clients in a round with noise_multiplier "
        f"{noise_multiplier:g}, and {num_expected:g} are expected: their answers alone would cost "
        "as much"
    )
