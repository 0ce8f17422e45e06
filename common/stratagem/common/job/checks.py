"""Check a job for errors that the table in `rules.py` cannot express: they need a calculation, a
walk through nested strategies, or a sentence made of several parts.

`job` is a JobSpec, possibly with invalid fields; it is typed Any because its class needs these
functions.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.base.text import counted
from stratagem.common.job.fields import Every, StopSpec
from stratagem.common.job.nested import effective, flat
from stratagem.common.job.optimizer import check_optimizer
from stratagem.common.job.privacy import AFTER_THE_NOISE, mixes_rows, too_few
from stratagem.common.job.schedules import ScheduleSpec
from stratagem.common.model.graph import GraphSpec
from stratagem.common.model.program import flatten
from stratagem.common.model.stages import plan_stages
from stratagem.common.privacy.adaptive_clipping import sum_noise_multiplier
from stratagem.common.schema.json import under
from stratagem.common.schema.rules import differing
from stratagem.common.strategy import (
    DIRECT_ALL_REDUCE,
    AllReduce,
    ByCapability,
    Custom,
    DataParallel,
    Decentralized,
    Federated,
    FederatedOptions,
    FedProx,
    Local,
    ModelParallel,
    Pipeline,
    PopulationBased,
    all_reduce_of,
    describe,
    is_cut,
    levels,
    local_steps_of,
    num_shards_of,
    partitions_state,
)
from stratagem.common.strategy.choices import KNOWN_TOPOLOGIES
from stratagem.common.strategy.regions import are_named
from stratagem.common.strategy.topology import graph_of

_INNER: Final = "strategy.options.inner"


# ---- All jobs ----


def check_objective_of_stages(job: Any) -> Iterator[Violation]:
    """Yield an error if a model cut into stages has an objective that needs the whole model."""
    if job.turns is not None or not is_cut(job.strategy):
        return
    if job.step is not None:
        text = "a function of the whole model has no place in stages, as ModelParallel cuts them"
        yield Violation("step", f"is not allowed with strategy ModelParallel: {text}")
    elif job.loss is not None and job.loss.name == "model":
        text = "model is not allowed with strategy ModelParallel: a stage cannot call "
        yield Violation("loss", f"{text}model(**batch); name a loss of the last stage's output")


def check_sites(job: Any) -> Iterator[Violation]:
    """Yield an error if `regions` names sites, and the job simulates its clients instead."""
    regions = getattr(job.strategy.options, "regions", None)
    if not job.data.worker_local and are_named(regions or {}):
        text = "names sites, which are workers with rows of their own; give data.worker_local, or "
        yield Violation("strategy.options.regions", text + "numbers of clients")


def check_evaluated_rows(job: Any) -> Iterator[Violation]:
    """Yield an error if an evaluation-only job sets two different batch sizes."""
    section = job.evaluation
    is_twice = section is not None and "batch_size" in job.model_fields_set
    if is_twice and job.batch_size != section.batch_size:
        text = f"is {job.batch_size}, and evaluation.batch_size {section.batch_size}; leave one out"
        yield Violation("batch_size", text)


# ---- Streams ----


def check_streams_of_strategies(job: Any) -> Iterator[Violation]:
    """Yield an error for each strategy, at any level, that cannot read a stream of rows."""
    for path, strategy in levels(job.strategy):
        match strategy:
            case ModelParallel():
                text = "is ModelParallel, which cannot go with a stream of rows (data.streams)"
                yield Violation(path, f"{text}; Local and DataParallel can")
            case DataParallel(aggregation=Decentralized()):
                text = "Decentralized cannot go with a stream of rows (data.streams); AllReduce and"
                yield Violation(f"{path}.aggregation.method", f"{text} ParameterServer can")
            case DataParallel() if local_steps_of(strategy) is not None:
                text = "cannot go with a stream of rows (data.streams): replicas go back together "
                yield Violation(
                    f"{path}.options.local_steps", f"{text}only where rows have numbers"
                )
            case Federated():
                if job.data.streams is not None:
                    text = "has no meaning under Federated: each client reads one stream of its own"
                    yield Violation("data.streams", text)
                if not isinstance(strategy.options.inner, Local | None):
                    text = "cannot go with a stream of rows (data.streams): a client is one worker "
                    yield Violation(f"{path}.options.inner", f"{text}then")
                return
            case DataParallel() | Local() if job.data.streams is not None:
                num_shards = num_shards_of(strategy)
                if job.data.streams % num_shards:
                    text = f"{job.data.streams} is not a multiple of {path}.num_replicas, which is "
                    yield Violation("data.streams", f"{text}{num_shards}")


# ---- Length, intervals and ends ----


def _intervals(job: Any) -> Iterator[tuple[str, Every]]:
    if job.checkpoint.every is not None:
        yield "checkpoint.every", job.checkpoint.every
    if job.evaluation is not None:
        yield "evaluation.every", job.evaluation.every


def check_units(job: Any) -> Iterator[Violation]:
    """Yield an error for each interval whose unit is not one that the strategy counts in."""
    kind = job.strategy.type
    by_kind = {
        "Federated": ("round",),
        "PopulationBased": ("generation",),
        "Custom": ("step", "epoch", "round"),
    }
    allowed = by_kind.get(kind, ("step", "epoch"))
    for field, every in _intervals(job):
        if every.unit not in allowed:
            units = " or ".join(f"{unit}s" for unit in allowed)
            yield Violation(field, f"'{every}' is not allowed; {kind} counts in {units}")


def check_followed(job: Any) -> Iterator[Violation]:
    """Yield an error if early stopping or a plateau follows an unmeasured metric, or has no
    mode."""
    evaluation, optimizer = job.evaluation, job.optimizer
    if evaluation is None:
        return
    followed: dict[str, StopSpec | ScheduleSpec | None] = {
        "evaluation.stop": evaluation.stop,
        "optimizer.schedule": optimizer and optimizer.plateau,
    }
    for path, spec in followed.items():
        if spec is None:
            continue
        if spec.metric is None:
            if evaluation.best is None:
                text = "missing; evaluation.best, its default, is not set, for example metric: loss"
                yield Violation(f"{path}.metric", text)
        elif problem := evaluation.why_not_measured(spec.metric):
            yield Violation(f"{path}.metric", problem)
        elif spec.mode is None and spec.metric != evaluation.best:
            text = f"missing; max or min, as {spec.metric!r} is to rise or to fall"
            yield Violation(f"{path}.mode", text)


def check_settings(job: Any) -> Iterator[Violation]:
    """Yield an error if a setting of the hyperparameter schedule ends at a step after which the run
    does not commit."""
    schedule, num_steps = job.hyperparameter_schedule, job.num_steps
    if schedule is None or num_steps is None or (schedule.last_step or 0) > num_steps:
        return
    if isinstance(job.strategy, Federated | PopulationBased | Custom):
        return  # each round is committed; the others decide by themselves
    for field, every in _intervals(job):
        if every.unit != "step":
            text = f"'{every}' is not allowed with hyperparameter_schedule, which counts in steps"
            yield Violation(field, text)
            return
    for end in schedule.ends(num_steps):
        if end != num_steps and all(end % every.count for _, every in _intervals(job)):
            text = f"must be a divisor of {end}, so that what a setting has trained is committed"
            yield Violation("checkpoint.every", text)
            return


# ---- Steps ----

MAX_TURNS: Final = 8


def check_turns(job: Any) -> Iterator[Violation]:
    """Yield an error if turns (optimizers that alternate in each step) are too few or too many,
    repeat a name, or do not fit the strategy."""
    turns = job.turns
    if turns is None:
        return
    if not 2 <= len(turns) <= MAX_TURNS:
        text = f"has {len(turns)} turns; 2 to {MAX_TURNS} are allowed, and one is a step"
        yield Violation("turns", text)
    names = [turn.name for turn in turns]
    for place, name in enumerate(names):
        if name in names[:place]:
            yield Violation(f"turns[{place}].name", f"{name!r} is the name of an earlier turn")
    for _, strategy in levels(job.strategy):
        is_gathered = isinstance(strategy, DataParallel) and not isinstance(
            strategy.aggregation, AllReduce
        )
        if is_gathered or isinstance(strategy, ModelParallel | Custom):
            text = f"are not allowed with strategy {describe(strategy)}; Local, DataParallel with "
            rest = "AllReduce, Federated, and PopulationBased over them take turns"
            yield Violation("turns", text + rest)
            return


def check_compression(job: Any) -> Iterator[Violation]:
    """Yield an error if the strategy exchanges nothing that the configured codec could encode."""
    if job.compression is None or job.compression.codec == "none":
        return
    strategy = job.strategy
    inner = getattr(strategy.options, "inner", None)
    if not isinstance(strategy, DataParallel | Federated):
        text = f"{describe(strategy)} exchanges neither gradients nor updates"
        yield Violation("compression", f"has no meaning here: {text}")
    elif not isinstance(inner, Local | None):
        text = f"is not possible around {describe(inner)}: its exchanges are its own"
        yield Violation("compression", text)
    if all_reduce_of(strategy) != DIRECT_ALL_REDUCE:
        text = f"{all_reduce_of(strategy)} sends sums, not what a codec makes of a shard"
        yield Violation("strategy.options.all_reduce", text)


def check_order_of_sums(job: Any) -> Iterator[Violation]:
    """Yield an error if a deterministic or verified job uses an all-reduce of varying order."""
    how, is_verified = all_reduce_of(job.strategy), job.verification is not None
    if how != DIRECT_ALL_REDUCE and (job.execution.deterministic or is_verified):
        text = f"{how} adds in an order that depends on the workers; "
        advice = "set execution.deterministic: false"
        if is_verified:
            advice = "use direct, as verification compares bits"
        yield Violation("strategy.options.all_reduce", text + advice)


def check_pipeline_accumulation(job: Any) -> Iterator[Violation]:
    """Yield an error if `accumulation` contradicts the innermost pipeline's micro-batches."""
    spec, (*_, (_, innermost)) = job.accumulation, levels(job.strategy)
    pipeline = innermost.communication if isinstance(innermost, ModelParallel) else None
    if not isinstance(pipeline, Pipeline):
        return
    if job.execution.accumulation_steps is not None or (
        spec is not None and spec.steps is not None
    ):
        text = "has no meaning under a Pipeline; its communication.micro_batch_size has"
        yield Violation("accumulation.steps", text)
    if spec is not None and spec.micro_batch_size not in (None, pipeline.micro_batch_size):
        text = (
            f"{spec.micro_batch_size} contradicts the Pipeline's communication.micro_batch_size, "
            f"{pipeline.micro_batch_size}; leave one of the two out"
        )
        yield Violation("accumulation.micro_batch_size", text)


_NOT_PREDICTED: Final[Mapping[str, str]] = {
    "Decentralized": "each node has gradients of its own to predict from",
    "Federated": "a client begins each round afresh, without a history to predict from",
    "ModelParallel": "a stage sees only its own share of the gradient, and whether a prediction "
    "was good is asked of the whole",
    "Custom": "what it has its workers do is not known here",
}


def _kind(strategy: Any) -> str:
    """Return the type of a strategy; "Decentralized" for DataParallel whose nodes gossip."""
    is_gossip = isinstance(strategy, DataParallel) and isinstance(
        strategy.aggregation, Decentralized
    )
    return "Decentralized" if is_gossip else str(strategy.type)


def check_phases(job: Any) -> Iterator[Violation]:
    """Yield an error if phase training is set with a strategy that excludes it, or without
    determinism.

    All members must decide alike when to predict, so each must hold the sum over the whole batch
    and the whole model.
    """
    if job.phases is None:
        return
    for kind in (_kind(strategy) for _, strategy in levels(job.strategy)):
        if kind in _NOT_PREDICTED:
            yield Violation("phases", f"not under {kind}: {_NOT_PREDICTED[kind]}")
            return
    if not job.execution.deterministic:
        text = "needs execution.deterministic: replicas decide alike only on equal bits"
        yield Violation("phases", text)


_NOT_AVERAGED: Final[Mapping[str, str]] = {
    "Decentralized": "aggregation.method Decentralized: each node has parameters of its own, and "
    "what is committed is their mean",
    "Federated": "type Federated inside of another strategy",
    "Custom": "type Custom: what it has workers do is not known here",
}


def check_weight_average(job: Any) -> Iterator[Violation]:
    """Yield an error if the strategy cannot keep an average of the parameters."""
    if job.weight_average is None or isinstance(job.strategy, Federated):
        return
    for path, strategy in levels(job.strategy):
        if reason := _NOT_AVERAGED.get(_kind(strategy)):
            yield Violation("weight_average", f"cannot go with {path}.{reason}")
            return


def check_local_periods(job: Any) -> Iterator[Violation]:
    """Yield an error if a commit or evaluation is due between joins of local-step replicas."""
    local_steps = local_steps_of(job.strategy)
    if local_steps is None:
        return
    for field, every in _intervals(job):
        count, unit = every.count, every.unit
        text = (
            f"'{counted(count, unit)}' is not allowed: the replicas are joined only after each "
            f"strategy.options.local_steps, {local_steps}"
        )
        if unit != "step":
            yield Violation(field, f"{text}; count in steps, a multiple of it")
        elif count % local_steps:
            below = count - count % local_steps
            nearest = [steps for steps in (below, below + local_steps) if steps]
            texts = " or ".join(f"'{counted(steps, 'step')}'" for steps in nearest)
            yield Violation(field, f"{text}; the nearest is {texts}")


BY_ELEMENT: Final = (
    *("adadelta", "adagrad", "adam", "adamax", "adamw", "nadam", "radam", "rmsprop", "sgd"),
)
"""Optimizers that compute the same bits on slices of a parameter as on the whole; tests check."""


def check_elementwise(job: Any) -> Iterator[Violation]:
    """Yield an error, if each worker keeps only a slice of the optimizer's state, for each
    optimizer not known to compute the same bits on slices as on whole parameters."""
    if job.optimizer is None or not partitions_state(job.strategy):
        return
    for grouped in job.optimizer.rules():
        if grouped.rule.name is None or grouped.rule.label.lower() not in BY_ELEMENT:
            text = (
                f'"{grouped.rule.label}" is not known to have the same bits for slices of a '
                "parameter, as strategy.options.partition_state needs it; known are "
                f"{', '.join(BY_ELEMENT)}"
            )
            key = "entrypoint" if grouped.rule.name is None else "name"
            yield Violation(f"{grouped.path}.{key}", text)


def check_outermost(job: Any) -> Iterator[Violation]:
    """Yield an error if a nested strategy sets an option that only the outermost one may set."""
    for path, strategy in levels(job.strategy):
        has = {
            "partition_state": partitions_state(strategy),
            "local_steps": local_steps_of(strategy) is not None,
        }
        for name in has:
            if has[name] and path != "strategy":
                text = "is possible in a strategy of its own only, not inside of another one"
                yield Violation(f"{path}.options.{name}", text)


# ---- Federations ----


def check_client_records(job: Any) -> Iterator[Violation]:
    """Yield an error if steps of clients are recorded without clients or `recording.steps`."""
    if job.recording is None or not job.recording.client_steps:
        return
    strategy, field = job.strategy, "recording.client_steps"
    if isinstance(strategy, PopulationBased):
        strategy = strategy.options.inner or Local()
    is_client = job.partition is not None and job.partition.client is not None
    if not isinstance(strategy, Federated | Custom) and not is_client:
        text = f"belongs to Federated only; the strategy is {strategy.type}"
        yield Violation(field, text)
    elif not job.recording.steps:
        yield Violation(field, "needs recording.steps")


_NORMALIZE: Final = "strategy.options.normalize"


def check_lengths_of_steps(job: Any) -> Iterator[Violation]:
    """Yield an error if updates are normalized (FedNova), but the job's optimizer settings make the
    length of a client's steps unknown."""
    strategy, optimizer = job.strategy, job.optimizer
    if not isinstance(strategy, Federated) or strategy.options.normalize is None or not optimizer:
        return
    groups = [(f"optimizer.groups[{i}]", entry) for i, entry in enumerate(optimizer.groups or ())]
    for path, group in groups:
        keys = [key for key in ("momentum", "nesterov", "dampening") if key in group.kwargs]
        for key in [*keys, *(["optimizer"] if group.optimizer is not None else [])]:
            text = f"is not possible with {_NORMALIZE}: all parameters go as far in a step"
            yield Violation(f"{path}.{key}", text)
    if not isinstance(strategy.aggregation, FedProx) or not strategy.aggregation.mu:
        return
    together = f"is not possible with FedProx and {_NORMALIZE} together"
    if optimizer.kwargs.get("momentum"):
        yield Violation("optimizer.momentum", f"{together}; use one of the two")
    if optimizer.schedule is not None:
        yield Violation("optimizer.schedule", f"{together}: lr · mu is one number for all rounds")
    for path, group in groups:
        if group.lr is not None:
            text = f"{together}: lr · mu is one number for all parameters"
            yield Violation(f"{path}.lr", text)
    mu, pull = strategy.aggregation.mu, optimizer.lr * strategy.aggregation.mu
    if pull >= 1:
        text = f"{mu:g} is too much with {_NORMALIZE}: lr · mu must be below 1, is {pull:g}"
        yield Violation("strategy.aggregation.mu", text)


# ---- Privacy ----


def check_adaptive_clipping(job: Any) -> Iterator[Violation]:
    """Yield an error if an adaptive clipping norm would follow too few clients for its noise."""
    spec, strategy = job.privacy, job.strategy
    if spec is None or spec.unit != "client" or not isinstance(strategy, Federated):
        return
    noise_multiplier = spec.noise_multiplier
    if spec.clip.adaptive is None or noise_multiplier is None:
        return
    if isinstance(strategy.client_selection, ByCapability):
        return  # how many clients have the tags is known when the roster is
    num_expected = spec.sampling_rate(strategy) * strategy.num_clients
    if sum_noise_multiplier(noise_multiplier, num_expected) is None:
        yield Violation("privacy.clip.adaptive", too_few(noise_multiplier, num_expected))


def check_rows_protected(job: Any) -> Iterator[Violation]:
    """Yield an error for each module and round option that row privacy does not allow."""
    if job.privacy is None or job.privacy.unit != "row" or not isinstance(job.strategy, Federated):
        return
    if job.model.graph is not None:
        yield from _mixing_rows(job.model.graph, "model.graph")
    defaults = FederatedOptions()
    others = [name for name in vars(defaults) if name not in AFTER_THE_NOISE]
    for name in differing(job.strategy.options, defaults, others):
        text = "is not possible with privacy.unit row: only what sees protected updates alone goes "
        yield Violation(f"strategy.options.{name}", f"{text}with it")


def _mixing_rows(graph: GraphSpec, path: str) -> Iterator[Violation]:
    for index, node in enumerate(graph.nodes):
        if "BatchNorm" in node.module:
            yield Violation(f"{path}.nodes[{index}].module", mixes_rows(node.id, node.module))
    for index, subgraph in enumerate(graph.subgraphs):
        yield from _mixing_rows(subgraph.graph, f"{path}.subgraphs[{index}].graph")


# ---- Graphs ----


def check_graph_strategy(job: Any) -> Iterator[Violation]:
    """Yield an error if the model graph names a strategy that differs from the job's."""
    graph = job.model.graph
    if graph is None or graph.training_strategy is None:
        return
    if effective(flat(graph.training_strategy), graph) != job.strategy:
        text = "differs from strategy; set one of the two"
        yield Violation("model.graph.training_strategy", text)


# ---- Jobs that are submitted ----


def check_keywords(job: Any) -> Iterator[Violation]:
    """Yield an error for each unknown optimizer keyword; the members of a population are checked
    elsewhere."""
    if job.search_space is None:
        for path, optimizer in job.optimizers().items():
            for error in check_optimizer(optimizer):
                yield Violation(f"{path}{error.field.removeprefix('optimizer')}", error.message)


def check_topology(job: Any) -> Iterator[Violation]:
    """Yield an error if the topology of a gossip strategy does not fit its number of nodes."""
    aggregation = getattr(job.strategy, "aggregation", None)
    if isinstance(aggregation, Decentralized):
        try:
            graph_of(aggregation.topology, job.strategy.num_replicas, job.seed)
        except ValueError as error:
            text = f"{error}; known topologies: {KNOWN_TOPOLOGIES}"
            yield Violation("strategy.aggregation.topology", text)


def check_replica(job: Any) -> Iterator[Violation]:
    """Yield an error if a replica is neither one worker nor a pipeline whose gradients can be
    summed stage by stage."""
    strategy, inner = job.strategy, getattr(job.strategy.options, "inner", None)
    if not isinstance(strategy, DataParallel) or isinstance(inner, Local | DataParallel | None):
        return  # groups of replicas are replicas, or why not has been said
    if not isinstance(inner, ModelParallel):
        text = f"{describe(inner)} cannot be a replica, which takes part in every step; Local, "
        yield Violation(_INNER, f"{text}ModelParallel and DataParallel can")
    elif isinstance(strategy.aggregation, Decentralized):
        text = "a node of 'Decentralized' is one worker, and no pipeline over several; AllReduce "
        yield Violation(
            "strategy.aggregation.method", f"{text}and ParameterServer have replicas that are"
        )
    else:
        yield from _partitions(job, inner, _INNER)


def check_stages(job: Any) -> Iterator[Violation]:
    """Yield an error if the partitions do not cover each node of a graph model exactly once;
    workers check other models."""
    if isinstance(job.strategy, ModelParallel):
        yield from _partitions(job, job.strategy, "strategy")


def _partitions(job: Any, spec: ModelParallel, path: str) -> Iterator[Violation]:
    if job.model.graph is not None:
        owned = [partition.node_ids for partition in spec.partitions]
        try:
            plan_stages(flatten(job.model.graph), owned)
        except InvalidInputError as error:
            yield from under(path, error.violations)
