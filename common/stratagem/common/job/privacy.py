"""This module defines the section `privacy`: differential privacy of the clients of a federation,
or of their rows.

The module depends on neither the accountant nor the noise. `rules.py` says what a job with this
section must not contain.
"""

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field

from stratagem.common.base.errors import Violation
from stratagem.common.schema.document import Positive, Section
from stratagem.common.schema.rules import rule
from stratagem.common.strategy import Federated, Random

# ---- Section ----

BelowOne = Annotated[float, Field(gt=0, lt=1)]


class AdaptiveClipSpec(Section):
    """Settings of an adaptive clipping norm, which follows a quantile of the updates' norms: in
    each round it is multiplied by a factor of e^(rate · distance from the quantile). See
    common/privacy/adaptive_clipping.py."""

    quantile: BelowOne = 0.5
    rate: Positive = 0.2


class ClipSpec(Section):
    """The clipping norm: the largest 2-norm of a client's change, or of a row's gradient, taken
    over all elements as one vector. With `adaptive` it is the norm of the first round."""

    norm: Positive
    adaptive: AdaptiveClipSpec | None = None


class PrivacyTargetSpec(Section):
    """The privacy budget. The run ends before the round that would spend more than epsilon at
    delta; a client whose rows are protected takes no part in such a round. Without epsilon the
    spent budget is only counted."""

    epsilon: Positive | None = None
    delta: BelowOne


class PrivacySpec(Section):
    """Settings of differential privacy.

    unit: what is protected: a "client" with all its rows, by noise that the coordinator adds; or
    each "row", by noise that its client adds in each step (DP-SGD). noise_multiplier: the noise's
    standard deviation over the clipping norm; None: the smallest one with which all rounds stay
    within the target. sampling: "poisson" draws each client independently and secretly, with the
    probability client_selection.fraction, and the accountant relies on that; "fixed" draws clients
    as without privacy, which everybody can predict, so the accountant counts each client in every
    round. With unit "row", rows are drawn by "poisson", with the probability batch_size / rows of
    the client. noise: "seeded" draws noise that everybody can compute; it is for tests and protects
    nobody.
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
        """Return the probability with which a client is drawn, for the accountant; 1 if the draw is
        not secret."""
        selection = strategy.client_selection
        is_drawn = self.sampling == "poisson" and isinstance(selection, Random)
        return selection.fraction if is_drawn and isinstance(selection, Random) else 1.0


def too_few(noise_multiplier: float, num_expected: float) -> str:
    """Return the error message that says why clipping cannot adapt to so few clients."""
    return (
        f"needs more than {10 * noise_multiplier:g} clients in a round with noise_multiplier "
        f"{noise_multiplier:g}, and {num_expected:g} are expected: their answers alone would cost "
        "as much"
    )


# ---- Protected rows ----
#
# What is possible in a job whose rows are protected (`privacy.unit: row`).

AFTER_THE_NOISE: Final = frozenset(
    {
        "local_epochs",
        "max_staleness",
        "on_client_error",
        "on_missing_quorum",
        "quorum",
        "robust",
        "round_deadline_s",
        "server_learning_rate",
        "server_optimizer",
    }
)
"""The options of a federated round that only see updates to which noise was already added."""

PER_ROW_LOSSES: Final = ("bce_with_logits", "cross_entropy", "l1", "mse", "nll")


def mixes_rows(name: str, kind: str) -> str:
    """Return the error message for a module that mixes rows, which row privacy forbids."""
    return (
        f'"{name}" is {kind}, which mixes the rows of a batch, so that no row has a gradient of '
        "its own, as privacy.unit row needs it; use GroupNorm or LayerNorm"
    )
