"""This module defines the section `privacy`: differential privacy of the clients of a federation,
or of their rows.

It checks the section and what a job with it must not contain besides. It depends on neither the
accountant nor the noise.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol

from pydantic import Field

from stratagem.common.base.errors import Violation
from stratagem.common.model.graph import GraphSpec
from stratagem.common.privacy.adaptive_clipping import sum_noise_multiplier
from stratagem.common.schema.document import Positive, Section
from stratagem.common.schema.rules import differing, rule
from stratagem.common.strategy import ByCapability, Federated, FederatedOptions, Random

if TYPE_CHECKING:
    from stratagem.common.job.job import JobSpec

# ---- Section ----

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


# ---- Protected rows ----
#
# A job whose rows are protected (`privacy.unit: row`) is checked before a model exists.
#
# A row must influence published results only through its clipped gradient. The rules therefore
# refuse everything that looks at several rows at once, publishes numbers of them, or decides by
# them, and every option of a round that is not known to see protected updates alone.

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
"""Options of a round that see protected updates only."""

PER_ROW_LOSSES: Final = ("bce_with_logits", "cross_entropy", "l1", "mse", "nll")
_ABSENT: Final = {
    "step": "a step of one's own sees all rows of a batch at once; write a loss",
    "turns": "the budget is that of one update in each step",
    "callbacks": "what they show, and when they end a round, would tell of rows without noise",
    "accumulation": "each row's gradient is clipped, and a step adds up as many rows as are drawn",
    "compression": "what a codec leaves out is not known to depend on noised numbers alone",
    "hyperparameter_schedule": "each step is accounted with the settings of the job",
}


class ProtectedJob(Protocol):
    """What is asked of a job here."""

    @property
    def privacy(self) -> Any: ...
    @property
    def data(self) -> Any: ...
    @property
    def execution(self) -> Any: ...
    @property
    def loss(self) -> Any: ...
    @property
    def model(self) -> Any: ...


def check_rows_protected(job: ProtectedJob, strategy: Federated) -> Iterator[Violation]:
    """Yield what does not go together with `privacy.unit: row`."""
    yield from _section(job)
    for name, why in _ABSENT.items():
        given = getattr(job, name)
        if given is not None and getattr(given, "codec", "") != "none":
            yield _not_possible(name, why)
    if job.data.collate is not None:
        yield _not_possible("data.collate", "it makes a row's batch of other rows, too")
    if job.data.streams is not None or job.data.shuffle_rows is not None:
        yield _not_possible("data.streams", "rows are drawn one by one, out of a known number")
    yield from _execution(job)
    if job.loss is not None and job.loss.entrypoint is None and job.loss.name not in PER_ROW_LOSSES:
        text = f"{job.loss.name} is not the mean of a loss of each row; use an entry point, or one "
        yield Violation("loss", f"{text}of {', '.join(PER_ROW_LOSSES)} with privacy.unit row")
    if job.model.graph is not None:
        yield from _graph(job.model.graph, "model.graph")
    defaults = FederatedOptions()
    others = [name for name in vars(defaults) if name not in AFTER_THE_NOISE]
    for name in differing(strategy.options, defaults, others):
        why = "only what sees protected updates alone goes with it"
        yield _not_possible(f"strategy.options.{name}", why)


def _section(job: ProtectedJob) -> Iterator[Violation]:
    spec = job.privacy
    assert spec is not None
    if spec.noise_multiplier is None:
        text = "missing; with privacy.unit row it cannot be computed for all clients at once, as "
        text += "they have different numbers of rows; for example noise_multiplier: 1.0"
        yield Violation("privacy.noise_multiplier", text)
    if spec.clip.adaptive is not None:
        yield _not_possible("privacy.clip.adaptive", "it is for the changes of clients")
    if spec.sampling == "fixed":
        text = '"fixed" is not possible with privacy.unit row: rows are drawn by "poisson"'
        yield Violation("privacy.sampling", text)


def _execution(job: ProtectedJob) -> Iterator[Violation]:
    own = job.execution
    if own.mode != "Eager":
        yield _not_possible("execution.mode", f"{own.mode} compiles what is computed of a batch")
    if own.precision in ("Mixed", "Half"):
        why = f"{own.precision} scales or rounds gradients before they are clipped"
        yield _not_possible("execution.precision", why)
    if own.gradient != "Full":
        yield _not_possible("execution.gradient", "each row has a gradient of its own; use Full")


def _graph(graph: GraphSpec, path: str) -> Iterator[Violation]:
    for index, node in enumerate(graph.nodes):
        if "BatchNorm" in node.module:
            yield Violation(f"{path}.nodes[{index}].module", mixes_rows(node.id, node.module))
    for index, subgraph in enumerate(graph.subgraphs):
        yield from _graph(subgraph.graph, f"{path}.subgraphs[{index}].graph")


def mixes_rows(name: str, kind: str) -> str:
    """Return why a module of a model cannot be there."""
    return (
        f'"{name}" is {kind}, which mixes the rows of a batch, so that no row has a gradient of '
        "its own, as privacy.unit row needs it; use GroupNorm or LayerNorm"
    )


def _not_possible(field: str, why: str) -> Violation:
    return Violation(field, f"is not possible with privacy.unit row: {why}")
