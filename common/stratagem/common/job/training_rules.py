"""Check the settings of a job that go together with streams, steps, slices, local steps, and
federated options.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from stratagem.common.base.errors import Violation
from stratagem.common.base.text import counted
from stratagem.common.job.fields import FROM_LOSS, LOSSES, RETURNED
from stratagem.common.job.optimizer import GroupSpec, OptimizerSpec
from stratagem.common.strategy import (
    DataParallel,
    Decentralized,
    Federated,
    FedProx,
    Local,
    ModelParallel,
    PopulationBased,
    Strategy,
    is_cut,
    local_steps_of,
    partitions_parameters,
    partitions_state,
)

if TYPE_CHECKING:
    from stratagem.common.job.job import JobSpec

# ---- Streams ----
#
# Training rows may come as a stream, whose length is unknown. A job says so by `data.streams` or
# `data.shuffle_rows`; if it says neither, only the worker that loads the data knows, and applies
# the same rules again.


def says_stream(job: "JobSpec") -> bool:
    """Return whether the job itself says that its training rows come as a stream."""
    return job.data.streams is not None or job.data.shuffle_rows is not None


def num_shards_of(strategy: Strategy) -> int:
    """Return the logical shards that each batch of the innermost strategy is cut into."""
    match strategy:
        case DataParallel():
            return strategy.num_replicas
        case _:
            inner = _inner(strategy)
            return 1 if inner is None else num_shards_of(inner)


def against_streams(job: "JobSpec") -> Iterator[Violation]:
    """Yield what cannot go together with a stream of training rows."""
    if job.epochs is not None:
        yield Violation(
            "epochs",
            "is not allowed with a stream of rows (data.streams), whose length is not known; "
            "set steps instead",
        )
    for name, every in (
        ("evaluation.every", job.evaluation.every if job.evaluation else None),
        ("checkpoint.every", job.checkpoint.every),
    ):
        if every is not None and every.unit == "epoch":
            text = f"'{every}' is not allowed with a stream of rows (data.streams); count in steps"
            yield Violation(name, text)
    if job.evaluation is not None and job.evaluation.split == "train":
        yield Violation(
            "evaluation.split",
            "'train' is a stream of rows (data.streams); what is evaluated must have a len()",
        )
    if job.data.order is not None:
        text = "is not allowed with data.streams: a stream decides its order; see data.shuffle_rows"
        yield Violation("data.order", text)
    if job.turns is not None:
        text = "read the rows of a step again in each turn, which a stream (data.streams) cannot"
        yield Violation("turns", text)
    if job.data.readers:
        text = "reads rows by number, which those of a stream (data.streams) have not; leave it out"
        yield Violation("data.readers", text)
    if job.execution.memory == "Cached":
        text = "Cached reads each row once, so it cannot go with a stream of rows (data.streams)"
        yield Violation("execution.memory", text)
    if job.partition is not None:
        yield Violation(
            "partition",
            "divides rows by their numbers, which those of a stream (data.streams) have not; a "
            "data function that takes client_id and num_clients gives a client's own stream",
        )
    yield from _against_strategy(job, job.strategy, "strategy")


def _against_strategy(job: "JobSpec", strategy: Strategy, path: str) -> Iterator[Violation]:
    inner = _inner(strategy)
    match strategy:
        case ModelParallel():
            text = "is ModelParallel, which cannot go with a stream of rows (data.streams)"
            yield Violation(path, f"{text}; Local and DataParallel can")
        case DataParallel(aggregation=Decentralized()):
            text = "Decentralized cannot go with a stream of rows (data.streams); AllReduce and"
            yield Violation(f"{path}.aggregation.method", f"{text} ParameterServer can")
        case DataParallel() if local_steps_of(strategy) is not None:
            text = "cannot go with a stream of rows (data.streams): replicas go back together only"
            yield Violation(f"{path}.options.local_steps", f"{text} where rows have numbers")
        case Federated():
            if job.data.streams is not None:
                text = "has no meaning under Federated: each client reads one stream of its own"
                yield Violation("data.streams", text)
            if inner is not None and not isinstance(inner, Local):
                text = "cannot go with a stream of rows (data.streams): a client is one worker then"
                yield Violation(f"{path}.options.inner", text)
        case DataParallel() | Local() if job.data.streams is not None:
            yield from _streams_not_a_multiple(job.data.streams, num_shards_of(strategy), path)
        case _:
            pass
    if inner is not None and not isinstance(strategy, Federated):
        yield from _against_strategy(job, inner, f"{path}.options.inner")


def _streams_not_a_multiple(num_streams: int, num_shards: int, path: str) -> Iterator[Violation]:
    if num_streams % num_shards:
        text = f"{num_streams} is not a multiple of {path}.num_replicas, which is {num_shards}"
        yield Violation("data.streams", text)


def _inner(strategy: Strategy) -> Strategy | None:
    inner: Strategy | None = getattr(strategy.options, "inner", None)
    return inner


# ---- Objective ----
#
# The objective of a job is one of `loss` and `step`. `step` names a function of (model, batch)
# that computes the loss itself; `predict` one that returns (output, target) for metrics. Neither
# can be cut into stages.

_NO_LOSS: Final = (
    "missing; a job has a loss, or a step that computes one, or turns; one of "
    f"{', '.join(sorted(LOSSES))}, for example loss: cross_entropy"
)


class Job(Protocol):
    """What is asked of a job here."""

    @property
    def model(self) -> Any: ...
    @property
    def loss(self) -> Any: ...
    @property
    def step(self) -> str | None: ...
    @property
    def turns(self) -> Any: ...
    @property
    def predict(self) -> str | None: ...
    @property
    def evaluation(self) -> Any: ...
    @property
    def strategy(self) -> Strategy: ...


def check_objective(job: Job) -> Iterator[Violation]:
    """Yield what is wrong with the objective of a job."""
    if job.turns is not None:
        yield from _metrics(job)
        return
    if job.loss is None and job.step is None:
        yield Violation("loss", _NO_LOSS)
        return
    if job.loss is not None and job.step is not None:
        yield Violation("step", "loss is set already; only one of the two may be")
    if job.step is None:
        if job.predict is not None:
            yield Violation(
                "predict", "goes with step or turns; a loss is of the model's output already"
            )
        yield from _returned_loss(job)
        return
    if is_cut(job.strategy):
        text = "a function of the whole model has no place in stages, as ModelParallel cuts them"
        yield Violation("step", f"is not allowed with strategy ModelParallel: {text}")
    yield from _metrics(job)


def _metrics(job: Job) -> Iterator[Violation]:
    own = job.evaluation
    if own is None or job.predict is not None:
        return
    text = "needs predict, a function (model, batch) -> (output, target)"
    for place, name in enumerate(own.metrics):
        if name not in FROM_LOSS:
            yield Violation(f"evaluation.metrics[{place}]", f"{name!r} {text}")
    if own.predictions:
        yield Violation("evaluation.predictions", text)


def _returned_loss(job: Job) -> Iterator[Violation]:
    if job.loss.name != RETURNED:
        return
    if is_cut(job.strategy):
        text = (
            "model is not allowed with strategy ModelParallel: a stage cannot call model(**batch)"
        )
        yield Violation("loss", f"{text}; name a loss of the last stage's output")
    if job.model.graph is not None:
        text = "model is not allowed with model.graph, which returns outputs and no loss"
        yield Violation("loss", text)


# ---- Divided state ----
#
# With `strategy.options.partition_state`, each worker steps its own slice of all parameters. An
# optimizer must give each element the same result as with the whole parameter, to the last bit,
# and whole gradients are not available. With `full`, whole parameters are not available between
# the passes of a model, either.

BY_ELEMENT: Final = (
    *("adadelta", "adagrad", "adam", "adamax", "adamw", "nadam", "radam", "rmsprop", "sgd"),
)
"""Optimizers whose bits are the same for slices of a parameter; tests compare them."""
OF_WHOLE_GRADIENTS: Final = {
    "compression": "it codes gradients for workers that need all of them",
    "phases": "a prediction is made from whole gradients",
    "turns": "each would need slices of its own",
}
"""Sections that do not go together with it, and why."""
OF_WHOLE_PARAMETERS: Final = {
    "weight_average": "it is an average of whole parameters, which no worker has after a step",
    "execution.mode": "compiled code would hold parameters that come and go; Eager does not",
    "execution.precision": "Half makes copies of all parameters at once; Mixed of one at a time",
}
"""Settings that do not go together with `full`, and why: a section, a mode that compiles, Half."""
_FIELD: Final = "strategy.options.partition_state"


def check_partition(
    strategy: Strategy, optimizer: OptimizerSpec | None, settings: Iterable[str]
) -> Iterator[Violation]:
    """Yield what contradicts a divided state, where the strategy has one.

    optimizer: None where turns have theirs. settings: those of `OF_WHOLE_GRADIENTS` and
    `OF_WHOLE_PARAMETERS` that the job has.
    """
    yield from _check_partitions_below(strategy, "strategy")
    if not partitions_state(strategy):
        return
    for each in () if optimizer is None else optimizer.rules():
        if each.rule.label.lower() not in BY_ELEMENT or each.rule.name is None:
            text = (
                f'"{each.rule.label}" is not known to have the same bits for slices of a '
                f"parameter, as {_FIELD} needs it; known are {', '.join(BY_ELEMENT)}"
            )
            yield Violation(
                f"{each.path}.{'entrypoint' if each.rule.name is None else 'name'}", text
            )
    for name in settings:
        if name in OF_WHOLE_GRADIENTS:
            yield Violation(name, f"is not allowed with {_FIELD}: {OF_WHOLE_GRADIENTS[name]}")
        elif partitions_parameters(strategy):
            text = f"is not allowed with {_FIELD}: full: {OF_WHOLE_PARAMETERS[name]}"
            yield Violation(name, text)


def _check_partitions_below(strategy: Strategy, path: str) -> Iterator[Violation]:
    """Yield the strategies inside of others that divide a state."""
    inner: Strategy | None = getattr(getattr(strategy, "options", None), "inner", None)
    if inner is None:
        return
    path = f"{path}.options.inner"
    if partitions_state(inner):
        text = "is possible in a strategy of its own only, not inside of another one"
        yield Violation(f"{path}.options.partition_state", text)
    yield from _check_partitions_below(inner, path)


# ---- Local steps ----
#
# With `strategy.options.local_steps`, no model is common to all replicas between two joins.
# Features that follow one model from step to step cannot work, and commits and evaluations happen
# at the joins.

OF_ONE_MODEL: Final = {
    "compression": "it codes gradients of single steps, which are not exchanged",
    "phases": "each replica has gradients of its own to predict from",
    "weight_average": "each replica has parameters of its own",
    "turns": "a replica has one optimizer",
    "hyperparameter_schedule": "it may change between two joins of the replicas",
}
"""Sections that do not go together with local steps, and why."""


def check_local_steps(
    strategy: Strategy, periods: Mapping[str, tuple[int, str]], sections: Iterable[str]
) -> Iterator[Violation]:
    """Yield what contradicts local steps, where the strategy has them.

    periods: by field (count, unit) of what is done at intervals. sections: those of `OF_ONE_MODEL`
    that the job has.
    """
    yield from _check_local_steps_below(strategy, "strategy")
    local_steps = local_steps_of(strategy)
    if local_steps is None:
        return
    for name, (count, unit) in periods.items():
        yield from _steps_not_a_multiple(name, count, unit, local_steps)
    for name in sections:
        text = f"is not allowed with strategy.options.local_steps: {OF_ONE_MODEL[name]}"
        yield Violation(name, text)


def _check_local_steps_below(strategy: Strategy, path: str) -> Iterator[Violation]:
    """Yield the strategies inside of others that have local steps."""
    inner: Strategy | None = getattr(getattr(strategy, "options", None), "inner", None)
    if inner is None:
        return
    path = f"{path}.options.inner"
    if local_steps_of(inner) is not None:
        text = "is possible in a strategy of its own only, not inside of another one"
        yield Violation(f"{path}.options.local_steps", text)
    yield from _check_local_steps_below(inner, path)


def _steps_not_a_multiple(
    name: str, count: int, unit: str, local_steps: int
) -> Iterator[Violation]:
    what = (
        f"'{counted(count, unit)}' is not allowed: the replicas are joined only after each "
        f"strategy.options.local_steps, {local_steps}"
    )
    if unit != "step":
        yield Violation(name, f"{what}; count in steps, a multiple of it")
    elif count % local_steps:
        below = count - count % local_steps
        nearest = [each for each in (below, below + local_steps) if each]
        texts = " or ".join(f"'{counted(each, 'step')}'" for each in nearest)
        yield Violation(name, f"{what}; the nearest is {texts}")


# ---- Correction of steps ----
#
# With `strategy.options.control`, a client measures its mean gradient by how far its steps have
# led. Each step must therefore be exactly the learning rate times the gradient of its rows,
# weight decay included.

_CONTROL: Final = "strategy.options.control"
_TOGETHER: Final = "is not possible with strategy.options.control: scaffold"
AGAINST_CONTROL: Final = {
    "turns": "is not possible with turns, which have an optimizer each",
    "hyperparameter_schedule": "is not possible with hyperparameter_schedule; leave it out",
    "compression.codec": "is not possible with a codec, whose losses would add up in what clients "
    "keep; use compression.codec: none",
}
"""Sections that `control` does not go together with, and why."""
_THE_GRADIENT_ALONE: Final = (
    f"{_TOGETHER}: a step must be lr times the gradient alone; leave it out"
)
_NOT_THE_GRADIENT: Final = ("momentum", "nesterov", "dampening", "maximize")


def check_control_of(
    strategy: Strategy, optimizer: OptimizerSpec | None, sections: Collection[str]
) -> Iterator[Violation]:
    """Yield what does not go together with the correction of clients' steps. sections: those of
    AGAINST_CONTROL that the job has."""
    if not isinstance(strategy, Federated) or strategy.options.control is None:
        return
    for name, text in AGAINST_CONTROL.items():
        if name in sections:
            yield Violation(_CONTROL, text)
    if optimizer is not None:
        yield from _against_optimizer(optimizer)
        for place, group in enumerate(optimizer.groups or ()):
            yield from _against_group(group, f"optimizer.groups[{place}]")


def _against_optimizer(optimizer: OptimizerSpec) -> Iterator[Violation]:
    if (optimizer.name or "").lower() != "sgd":
        text = f"{optimizer.label} {_TOGETHER}, which measures gradients by steps of sgd; use that"
        yield Violation("optimizer.name", text)
    if optimizer.clip_norm is not None:
        text = f"{optimizer.clip_norm:g} {_TOGETHER}: clipped steps tell no gradient; leave it out"
        yield Violation("optimizer.clip_norm", text)
    if optimizer.schedule is not None and optimizer.schedule.entrypoint is not None:
        text = f"{_TOGETHER}: rates must stay the same within a round"
        yield Violation("optimizer.schedule.entrypoint", text)
    yield from _against_keywords(optimizer.kwargs, "optimizer")


def _against_group(group: GroupSpec, path: str) -> Iterator[Violation]:
    if group.optimizer is not None:
        yield Violation(f"{path}.optimizer", f"{group.optimizer.label} {_THE_GRADIENT_ALONE}")
    yield from _against_keywords(group.kwargs, path)


def _against_keywords(kwargs: Mapping[str, Any], path: str) -> Iterator[Violation]:
    for key in _NOT_THE_GRADIENT:
        if kwargs.get(key):
            yield Violation(f"{path}.{key}", f"{kwargs[key]} {_THE_GRADIENT_ALONE}")


# ---- Weights of clients ----
#
# With `strategy.options.q` a client's change of the model stands for a gradient of one loss, at
# one learning rate. With `strategy.options.normalize` the distance that its steps can go must be
# known.

_Q: Final = "strategy.options.q"
_NORMALIZE: Final = "strategy.options.normalize"
AGAINST_Q: Final = {
    "privacy": "is not possible with privacy: each client would tell the loss of its rows",
    "data.streams": "is not possible with a stream of rows, which would be read once more",
    "turns": "is not possible with turns, which have a loss and a rate each",
}
"""Sections that `q` does not go together with, and why."""
AGAINST_NORMALIZE: Final = {
    "privacy": "is not possible with privacy: a change would count more than it is clipped to",
    "turns": "is not possible with turns, which have an optimizer each",
    "hyperparameter_schedule": "is not possible with hyperparameter_schedule; leave it out",
}
"""Sections that `normalize` does not go together with, and why."""
MOMENTUM: Final = "momentum"


def check_weighing_of(
    strategy: Strategy, optimizer: OptimizerSpec | None, sections: Collection[str]
) -> Iterator[Violation]:
    """Yield what does not go together with how the rounds of the strategy weigh updates.

    sections: those of the tables above that the job has.
    """
    if not isinstance(strategy, Federated):
        return
    if strategy.options.q is not None:
        yield from _against_q(optimizer, sections)
    if strategy.options.normalize is not None:
        yield from _against_normalize(strategy, optimizer, sections)


def _against_q(optimizer: OptimizerSpec | None, sections: Collection[str]) -> Iterator[Violation]:
    for name, text in AGAINST_Q.items():
        if name in sections:
            yield Violation(_Q, text)
    if optimizer is None:
        return
    if (optimizer.name or "").lower() != "sgd":
        text = f"{optimizer.label} is not possible with {_Q}, which takes its changes for gradients"
        yield Violation("optimizer.name", f"{text} times lr; use sgd")
    one = f"is not possible with {_Q}, which has one learning rate for all"
    if optimizer.schedule is not None:
        yield Violation("optimizer.schedule", f"{one} rounds; leave it out")
    if "hyperparameter_schedule" in sections:
        yield Violation("hyperparameter_schedule", f"{one} rounds; leave it out")
    for place, group in enumerate(optimizer.groups or ()):
        if group.lr is not None or group.optimizer is not None:
            name = "lr" if group.lr is not None else "optimizer"
            yield Violation(f"optimizer.groups[{place}].{name}", f"{one} parameters; leave it out")


def _against_normalize(
    strategy: Federated, optimizer: OptimizerSpec | None, sections: Collection[str]
) -> Iterator[Violation]:
    for name, text in AGAINST_NORMALIZE.items():
        if name in sections:
            yield Violation(_NORMALIZE, text)
    if optimizer is None:
        return
    if (optimizer.name or "").lower() != "sgd":
        text = f"{optimizer.label} is not possible with {_NORMALIZE}: how far its steps go is known"
        yield Violation("optimizer.name", f"{text} of sgd alone; use that")
    for key in ("nesterov", "dampening"):
        if optimizer.kwargs.get(key):
            text = f"is not possible with {_NORMALIZE}, which is defined for plain momentum"
            yield Violation(f"optimizer.{key}", text)
    for place, group in enumerate(optimizer.groups or ()):
        own = [key for key in (MOMENTUM, "nesterov", "dampening") if key in group.kwargs]
        for key in [*own, *(["optimizer"] if group.optimizer is not None else [])]:
            text = f"is not possible with {_NORMALIZE}: all parameters go as far in a step"
            yield Violation(f"optimizer.groups[{place}].{key}", text)
    if optimizer.schedule is not None and optimizer.schedule.entrypoint is not None:
        text = f"is not possible with {_NORMALIZE}: rates must stay the same within a round"
        yield Violation("optimizer.schedule.entrypoint", text)
    if isinstance(strategy.aggregation, FedProx) and strategy.aggregation.mu:
        yield from _against_pull(strategy.aggregation.mu, optimizer)


def _against_pull(mu: float, optimizer: OptimizerSpec) -> Iterator[Violation]:
    """Yield why it is not known how far steps go that FedProx pulls back."""
    together = f"is not possible with FedProx and {_NORMALIZE} together"
    if optimizer.kwargs.get(MOMENTUM):
        yield Violation(f"optimizer.{MOMENTUM}", f"{together}; use one of the two")
    if optimizer.schedule is not None:
        yield Violation("optimizer.schedule", f"{together}: lr · mu is one number for all rounds")
    for place, group in enumerate(optimizer.groups or ()):
        if group.lr is not None:
            text = f"{together}: lr · mu is one number for all parameters"
            yield Violation(f"optimizer.groups[{place}].lr", text)
    if optimizer.lr * mu >= 1:
        text = f"{mu:g} is too much with {_NORMALIZE}: lr · mu must be below 1"
        yield Violation("strategy.aggregation.mu", f"{text}, is {optimizer.lr * mu:g}")


# ---- Secure aggregation ----
#
# These rules apply to a job with `strategy.options.secure_aggregation`.


def check_secure_aggregation(
    strategy: Strategy,
    *,
    is_coded: bool,
    is_private: bool,
    evaluates_at_clients: bool,
    records_clients: bool,
) -> Iterator[Violation]:
    """Yield what would show a single client's update, or cannot be added up under masks.

    is_coded: the job has a codec. is_private: it has the section `privacy`. evaluates_at_clients:
    each client evaluates on rows of its own. records_clients: single steps of clients are kept.
    """
    if isinstance(strategy, PopulationBased):
        inner = strategy.options.inner
        if isinstance(inner, Federated) and inner.options.secure_aggregation is not None:
            text = (
                "is not possible in a population: a member repeats rounds from other states, and a "
                "round is unmasked once"
            )
            yield Violation("strategy.options.inner.options.secure_aggregation", text)
    if not isinstance(strategy, Federated) or strategy.options.secure_aggregation is None:
        return
    if is_coded:
        text = "is not possible with secure_aggregation, which sends whole numbers under masks"
        yield Violation("compression", text)
    if is_private:
        text = (
            "is not possible with secure_aggregation: noise is added where the updates are seen, "
            "and they are seen nowhere"
        )
        yield Violation("privacy", text)
    if evaluates_at_clients:
        text = (
            "is not possible with secure_aggregation and data.worker_local: each client's numbers "
            "would be seen; evaluate rows that all may see in a run of its own"
        )
        yield Violation("evaluation", text)
    if records_clients:
        text = "is not possible with secure_aggregation: the steps of single clients would be seen"
        yield Violation("recording.client_steps", text)


# ---- States of clients ----
#
# These rules apply when the clients of a federation keep state from round to round.

_WHERE: Final = "strategy.options"


def check_client_state(
    strategy: Strategy, *, is_at_workers: bool, is_private: bool, is_evaluated: bool
) -> Iterator[Violation]:
    """Yield what does not go together with the state of clients in a job.

    is_at_workers: its rows never leave a worker, and each client has one of its own.
    """
    if isinstance(strategy, PopulationBased):
        inner = strategy.options.inner
        if isinstance(inner, Federated) and inner.options.has_client_state:
            text = (
                "a member that copies another one cannot copy what its clients keep; leave it out"
            )
            yield Violation(f"{_WHERE}.inner.options.{_key(inner)}", text)
        return
    if not isinstance(strategy, Federated) or not strategy.options.has_client_state:
        return
    where = f"{_WHERE}.{_key(strategy)}"
    if strategy.options.personal is not None and is_evaluated and not is_at_workers:
        text = "is not possible with strategy.options.personal and simulated clients: one worker "
        text += "evaluates for all, and no model is whole there; leave it out, or use "
        yield Violation("evaluation", f"{text}data.worker_local")
    if strategy.options.q is not None and strategy.options.has_own_models:
        text = "is not possible with q, which weighs clients by the loss of one model for all"
        yield Violation(where, f"{text}; leave one out")
    if is_private:
        text = "is not possible with privacy: no accountant here counts what a client keeps"
        yield Violation(where, text)


def _key(strategy: Federated) -> str:
    names = ("personal", "ditto", "control")
    return next(name for name in names if getattr(strategy.options, name) is not None)
