"""What a job may not say whose rows are protected (`privacy.unit: row`), before a model is there.

A row must have no way into what is published but its clipped gradient. So what looks at several
rows at once, publishes numbers of them, or decides by them is refused; so is every option of a
round that is not known to see protected updates alone.
"""

from collections.abc import Iterator
from typing import Any, Final, Protocol

from stratagem.common.base.errors import Violation
from stratagem.common.model.graph import GraphSpec
from stratagem.common.schema.rules import differing
from stratagem.common.strategy import Federated, FederatedOptions

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
