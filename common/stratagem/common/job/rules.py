"""State which parts of a job cannot be combined, and why: a table, read from top to bottom.

The syntax of the rows is described in `common/schema/table.py`. Each section checks itself; these
rules run once all sections are read, so all errors are reported at once. A check that no row can
express is a function of `checks.py`, listed among the rows.
"""

from collections.abc import Iterator
from typing import Any, Final

from stratagem.common.base import ids
from stratagem.common.base.errors import Violation
from stratagem.common.job import checks
from stratagem.common.job.fields import LOSSES
from stratagem.common.job.privacy import PER_ROW_LOSSES
from stratagem.common.schema.rules import UnreadFieldError
from stratagem.common.schema.table import Rules, Table, Under, found_in

# fmt: off

# ---- All jobs ----

_PREDICT: Final = {
    "evaluation.metrics[] is not loss|perplexity": "{evaluation.metrics[]!r} ",
    "evaluation.predictions": "",
}
_NEEDS_PREDICT: Final = "{}needs predict, a function (model, batch) -> (output, target)"
_FEDERATED_ONLY: Final = "belongs to Federated only; the strategy is {strategy.type}"
_CACHED: Final = "Cached reads each row once, so it cannot go with {}"

EVERY_JOB: Final[Table] = (
    # The objective is a loss, or a step that computes one, or turns.
    Rules("no turns", "{}", {
        "no loss when no step": "missing; a job has a loss, or a step that computes one, or "
        f"turns; one of {', '.join(sorted(LOSSES))}, for example loss: cross_entropy",
        "step when loss": "loss is set already; only one of the two may be",
        "predict when loss and no step": "goes with step or turns; a loss is of the model's output "
        "already",
        "loss when loss.name is model and model.graph and no step": "model is not allowed with "
        "model.graph, which returns outputs and no loss",
    }),
    Rules("turns and no predict", _NEEDS_PREDICT, _PREDICT),
    Rules("step and no turns and no predict", _NEEDS_PREDICT, _PREDICT),
    checks.check_objective_of_stages,
    # Clients have rows of their own.
    Rules("no strategy.type is Federated", _FEDERATED_ONLY, {
        "partition when no partition.client": "",
        "data.worker_local": "",
    }),
    Rules("strategy.type is Federated", "{}", {
        "partition.client": "has no meaning under Federated itself",
        "data.order when no data.order.by is shuffle": "is not allowed with strategy Federated, "
        "whose clients shuffle their own rows",
        "partition when data.worker_local": "worker_local data is divided by where it is",
    }),
    checks.check_sites,
    # Memory, predictions and parallelism
    Rules("execution.memory is Cached", _CACHED, {
        "execution.memory when data.collate": "data.collate; leave one out",
        "execution.memory when data.readers is not 0": "data.readers; leave one out",
    }),
    Rules("", "{}", {
        "evaluation.predictions when no execution.gradient is None": "belongs to a job that only "
        "evaluates: set execution.gradient to None",
        "execution.parallelism when no strategy.type is Local": "chooses the strategy, which is "
        "{strategy.type} already; leave one of the two out",
    }),
    Rules("execution.gradient is Accumulated",
          "Accumulated says what accumulation.{} says already; leave one out", {
        "execution.gradient when accumulation.micro_batch_size": "micro_batch_size",
        "execution.gradient when accumulation.steps": "steps",
    }),
)

# ---- Jobs that only evaluate ----
#
# A job with `execution.gradient: None` trains nothing. It evaluates one state, once, on all rows
# of one split.

_UNTRAINED: Final = "execution.gradient is None, so nothing is trained"

EVALUATING: Final[Table] = (
    Rules("", f"{_UNTRAINED}: {{}}; leave it out", {
        "optimizer": "there is nothing to update",
        "weight_average": "there are no updates to average over",
        "epochs": "each row is evaluated once",
        "steps": "each row is evaluated once",
        "accumulation": "there are no gradients to add up",
        "compression": "there are no gradients to code",
        "phases": "there are no gradients to predict",
        "privacy": "there are no clients to protect",
        "partition": "there are no clients to divide the rows among",
        "search_space": "there is nothing to tune",
        "steps_per_generation": "there are no steps",
        "hyperparameter_schedule": "there are no steps",
        "verification": "there are no segments to compute again",
        "initial.resume": "there are no steps to go on with",
        "checkpoint.every": "there is one state",
        "evaluation.best": "there is one state",
        "evaluation.stop": "there is one state",
        "evaluation.every": "it is evaluated once",
    }),
    Rules("", "{}", {
        "no evaluation": f"missing; {_UNTRAINED}, and it says what is evaluated, for example "
        "evaluation: {split: test}",
        "evaluation.of is average": f"{_UNTRAINED}: there is no average; begin from the file of "
        "one, as initial.file",
        "execution.parallelism is ModelParallel|PipelineParallel": "{execution.parallelism} "
        f"cuts a model by what training costs; {_UNTRAINED}. Say strategy: ModelParallel with "
        "partitions, or DataParallel, which divides rows",
    }),
    checks.check_evaluated_rows,
    Rules("no execution.parallelism is ModelParallel|PipelineParallel", "{}", {
        "strategy.options.inner when strategy.aggregation.method is AllReduce and no "
        "strategy.options.inner.type is Local": f"{_UNTRAINED}: a replica is one worker; leave it "
        "out",
        "strategy.options.all_reduce": f"{_UNTRAINED}: there is nothing to add up; leave it out",
        "evaluation.predictions when strategy.type is ModelParallel": "is not possible under "
        "ModelParallel: outputs are with the last stage alone",
        "strategy.aggregation.method is ParameterServer|Decentralized": f"{_UNTRAINED}: there is "
        "nothing to aggregate; AllReduce stands for plain replicas",
        "strategy.type is Federated|PopulationBased|Custom": "{strategy.type} trains, and "
        f"{_UNTRAINED}; Local, DataParallel and ModelParallel evaluate",
    }),
)

# ---- Streams ----
#
# Training rows may come as a stream, whose length is unknown. A job says so by `data.streams` or
# `data.shuffle_rows`; if it says neither, only the worker that loads the data knows, and applies
# the same rules again.

STREAM: Final[Table] = (
    Rules("", "{}", {
        "epochs": "is not allowed with a stream of rows (data.streams), whose length is not known; "
        "set steps instead",
        **{
            f"at {field}: {field}.unit is epoch": f"'{{{field}}}' is not allowed with a stream of "
            "rows (data.streams); count in steps"
            for field in ("evaluation.every", "checkpoint.every")
        },
        "evaluation.split is train": "'train' is a stream of rows (data.streams); what is "
        "evaluated must have a len()",
        "data.order": "is not allowed with data.streams: a stream decides its order; see "
        "data.shuffle_rows",
        "turns": "read the rows of a step again in each turn, which a stream (data.streams) cannot",
        "data.readers is not 0": "reads rows by number, which those of a stream (data.streams) "
        "have not; leave it out",
        "execution.memory is Cached": _CACHED.replace("{}", "a stream of rows (data.streams)"),
        "partition": "divides rows by their numbers, which those of a stream (data.streams) have "
        "not; a data function that takes client_id and num_clients gives a client's own stream",
    }),
    checks.check_streams_of_strategies,
)

# ---- Length, intervals and ends ----

_ENDS_BY_LENGTH: Final = "Local|DataParallel|ModelParallel"
_LENGTHS: Final = {"epochs": "", "steps": ""}
_FOLLOWED: Final = {"evaluation.stop": "", "at optimizer.schedule: optimizer.plateau": ""}
_SCHEDULE: Final = "hyperparameter_schedule"

_LENGTH: Final[Table] = (
    Rules("", "missing; {}", {
        "no batch_size": "for example batch_size: 32",
        "no optimizer when no turns": "for example optimizer: {name: sgd, lr: 0.1}",
        f"no epochs when no steps and strategy.type is {_ENDS_BY_LENGTH}": "{strategy.type} needs "
        "epochs or steps, for example epochs: 5",
    }),
    Rules("strategy.type is Federated",
          "has no meaning under Federated; strategy.rounds and options.local_epochs have; leave it "
          "out", _LENGTHS),
    Rules("strategy.type is PopulationBased",
          "has no meaning under PopulationBased; steps_per_generation has; leave it out", _LENGTHS),
    Rules(f"strategy.type is {_ENDS_BY_LENGTH}|Custom", "{}", {
        "steps when epochs": "epochs is set already; only one of the two may be",
    }),
    checks.check_units,
    # What a job goes on from
    Rules("initial.resume", "is not possible {}", {
        "initial.resume when strategy.type is PopulationBased": "under PopulationBased: a commit "
        "is the state of one member; give its hyperparameters to a job without a population",
        "initial.resume when strategy.type is Custom": "under Custom: what it keeps besides a "
        "state is not known here",
        "initial.resume when strategy.aggregation.method is FedYogi": "with FedYogi: what its "
        "server optimizer keeps is in no commit",
    }),
    Rules("initial.resume",
          "{} must be more than the {initial.step} of the state that is resumed", {
        "strategy.rounds <= initial.step": "{strategy.rounds}",
        "steps <= initial.step when no strategy.type is Federated": "{steps}",
    }),
    # What follows the evaluations
    Rules("strategy.type is PopulationBased",
          "is not allowed with strategy PopulationBased, whose members copy each other's states; "
          "leave it out", _FOLLOWED),
    Rules("strategy.type is Custom",
          "is not allowed with strategy Custom, which decides itself when a run ends", _FOLLOWED),
    Rules("optimizer.plateau", "{}", {
        "no evaluation": "missing; optimizer.schedule follows evaluations, for example evaluation: "
        "{best: loss, mode: min}",
    }),
    checks.check_followed,
    # Hyperparameters that change
    Rules(_SCHEDULE, "is not possible with strategy {strategy.type}, which decides by itself", {
        f"{_SCHEDULE} when strategy.type is PopulationBased|Custom": "",
    }),
    Rules(f"{_SCHEDULE} and no strategy.type is PopulationBased|Custom", "{}", {
        "no steps when no strategy.type is Federated": f"missing; {_SCHEDULE} counts in steps, for "
        "example steps: 1000",
        "initial.resume when num_steps": f"is not possible with {_SCHEDULE}, which begins at step "
        "0",
        "at optimizer.schedule: optimizer.plateau and num_steps": "is not allowed with "
        f"{_SCHEDULE}: a plateau is followed under one setting only",
        "evaluation.stop when num_steps": f"is not allowed with {_SCHEDULE}, whose last_step is "
        "its end",
        f"{_SCHEDULE}.last_step > num_steps": f"{{{_SCHEDULE}.last_step}} is more than the "
        "{num_steps} steps of the job",
    }),
    checks.check_settings,
)

# ---- Steps ----

_STEPS: Final[Table] = (
    # Turns: a step has several optimizers.
    Rules("turns", "{}", {
        "at turns[].optimizer.schedule: turns[].optimizer.plateau": "plateau is not allowed in "
        "turns, which follow no metric",
        "at turns[].optimizer.schedule: turns[].optimizer.schedule.entrypoint": "a schedule by "
        "entry point is not allowed in turns, which share no state of it",
        "callbacks": "are not allowed with turns: a step has several gradients",
        "compression": "is not allowed with turns: it follows one gradient in each step",
        "phases": "is not allowed with turns: it follows one gradient in each step",
    }),
    Rules("turns", "is not allowed beside turns, each of which has its own", {
        "loss": "",
        "step": "",
        "optimizer": "",
    }),
    checks.check_turns,
    # Compression
    Rules("compression.codec is not none", "{}", {
        "compression.codec when execution.precision is Full|Half": "{compression.codec} codes "
        "float32; precision is {execution.precision}",
        "compression.error_feedback when strategy.type is Federated": "is not possible under "
        "Federated: clients keep nothing from round to round",
        "compression.error_feedback when strategy.aggregation.method is Decentralized": "is not "
        "possible under Decentralized: differences to public copies are one already",
        "compression.stochastic when compression.codec is ternary and strategy.aggregation.method "
        "is Decentralized": "is not possible under Decentralized: the public copies would drift "
        "away",
    }),
    Rules("compression.codec is not none", "belongs to Decentralized only", {
        "compression.consensus_step_size when no strategy.type is DataParallel": "",
        "compression.consensus_step_size when strategy.aggregation.method is AllReduce|"
        "ParameterServer": "",
    }),
    checks.check_compression,
    checks.check_order_of_sums,
    # Accumulation
    Rules("", "{} is more than batch_size, {batch_size}", {
        "accumulation.micro_batch_size > batch_size": "{accumulation.micro_batch_size} rows",
        "accumulation.steps > batch_size": "{accumulation.steps} micro-batches",
        "at accumulation.steps: execution.accumulation_steps > batch_size":
        "{execution.accumulation_steps} micro-batches",
    }),
    checks.check_pipeline_accumulation,
    # Phases and averages
    checks.check_phases,
    checks.check_weight_average,
    Rules("no weight_average", "there is no average without weight_average", {
        "evaluation.of is average": "",
    }),
    # Local steps: no model is common to all replicas between two joins.
    Rules("strategy.options.local_steps", "is not allowed with strategy.options.local_steps: {}", {
        "compression": "it codes gradients of single steps, which are not exchanged",
        "phases": "each replica has gradients of its own to predict from",
        "weight_average": "each replica has parameters of its own",
        "turns": "a replica has one optimizer",
        "hyperparameter_schedule": "it may change between two joins of the replicas",
    }),
    checks.check_local_periods,
    Rules("strategy.options.outer_bits", "codes float32; precision is {execution.precision}", {
        "strategy.options.outer_bits when execution.precision is Full|Half": "",
    }),
    # Divided state: whole gradients are not available, with `full` whole parameters neither.
    Rules("strategy.options.partition_state",
          "is not allowed with strategy.options.partition_state: {}", {
        "compression": "it codes gradients for workers that need all of them",
        "phases": "a prediction is made from whole gradients",
        "turns": "each would need slices of its own",
    }),
    Rules("strategy.options.partition_state is full",
          "is not allowed with strategy.options.partition_state: full: {}", {
        "weight_average": "it is an average of whole parameters, which no worker has after a step",
        "execution.mode": "compiled code would hold parameters that come and go; Eager does not",
        "execution.precision is Half": "Half makes copies of all parameters at once; Mixed of one "
        "at a time",
    }),
    checks.check_elementwise,
    checks.check_outermost,
)

# ---- Populations ----

_NO_METRIC: Final = "missing; PopulationBased needs a metric to compare members by, for example"
_CLIENTS_KEEP: Final = ("personal", "ditto", "control")

_POPULATION: Final[Table] = (
    Rules("no strategy.type is PopulationBased",
          "belongs to PopulationBased only; the strategy is {strategy.type}", {
        "search_space": "",
        "steps_per_generation": "",
    }),
    Rules("strategy.type is PopulationBased", "{}", {
        "at search_space: no search_space.dimensions": "missing; PopulationBased needs "
        "hyperparameters to explore, for example search_space: {optimizer.lr: {low: 0.001, high: "
        "0.1, scale: log}}",
        "no steps_per_generation": "missing; the optimizer steps of one generation, for example "
        "steps_per_generation: 50",
        "no evaluation.best when evaluation": f"{_NO_METRIC} best: loss",
        "no evaluation.best when no evaluation": f"{_NO_METRIC} evaluation: {{best: loss, mode: "
        "min}",
        "checkpoint.every": "is not allowed; members are committed after every generation",
        "strategy.options.inner.options.secure_aggregation": "is not possible in a population: a "
        "member repeats rounds from other states, and a round is unmasked once",
    }),
    Rules("strategy.type is PopulationBased",
          "a member that copies another one cannot copy what its clients keep; leave it out",
          {f"strategy.options.inner.options.{name}": "" for name in _CLIENTS_KEEP}),
)

# ---- Federations ----

_Q: Final = "strategy.options.q"
_NORMALIZE: Final = "strategy.options.normalize"
_CONTROL: Final = "strategy.options.control"
_NO_SGD: Final = "at optimizer.name: optimizer and no optimizer.label is sgd"
_ONE_RATE: Final = f"is not possible with {_Q}, which has one learning rate for all"
_THE_GRADIENT_ALONE: Final = (
    f"is not possible with {_CONTROL}: scaffold: a step must be lr times the gradient alone; leave "
    "it out"
)
_NOT_THE_GRADIENT: Final = ("momentum", "nesterov", "dampening", "maximize")

_FEDERATIONS: Final[Table] = (
    # q: a client's change of the model stands for a gradient of one loss, at one learning rate.
    Rules(_Q, "is not possible with {}", {
        f"{_Q} when privacy": "privacy: each client would tell the loss of its rows",
        f"{_Q} when data.is_stream": "a stream of rows, which would be read once more",
        f"{_Q} when turns": "turns, which have a loss and a rate each",
    }),
    Rules(_Q, "{}", {
        _NO_SGD: f"{{optimizer.label}} is not possible with {_Q}, which takes its changes for "
        "gradients times lr; use sgd",
        "optimizer.schedule": f"{_ONE_RATE} rounds; leave it out",
        "hyperparameter_schedule when optimizer": f"{_ONE_RATE} rounds; leave it out",
        "optimizer.groups[].lr": f"{_ONE_RATE} parameters; leave it out",
        "optimizer.groups[].optimizer when no optimizer.groups[].lr": f"{_ONE_RATE} parameters; "
        "leave it out",
    }),
    # normalize: the distance that a client's steps can go must be known.
    Rules(_NORMALIZE, "is not possible with {}", {
        f"{_NORMALIZE} when privacy": "privacy: a change would count more than it is clipped to",
        f"{_NORMALIZE} when turns": "turns, which have an optimizer each",
        f"{_NORMALIZE} when hyperparameter_schedule": "hyperparameter_schedule; leave it out",
        "optimizer.schedule.entrypoint": f"{_NORMALIZE}: rates must stay the same within a round",
        **{
            f"at optimizer.{key}: optimizer.kwargs.{key}": f"{_NORMALIZE}, which is defined "
            "for plain momentum"
            for key in ("nesterov", "dampening")
        },
    }),
    Rules(_NORMALIZE,
          f"{{optimizer.label}} is not possible with {_NORMALIZE}: how far its steps go is known "
          "of sgd alone; use that", {
        _NO_SGD: "",
    }),
    checks.check_lengths_of_steps,
    # control: each step is exactly the learning rate times the gradient of the client's rows.
    Rules(_CONTROL, "is not possible with {}", {
        f"{_CONTROL} when turns": "turns, which have an optimizer each",
        f"{_CONTROL} when hyperparameter_schedule": "hyperparameter_schedule; leave it out",
        f"{_CONTROL} when compression.codec is not none": "a codec, whose losses would add up in "
        "what clients keep; use compression.codec: none",
    }),
    Rules(f"{_CONTROL} and optimizer", "{}", {
        _NO_SGD: f"{{optimizer.label}} is not possible with {_CONTROL}: scaffold, which measures "
        "gradients by steps of sgd; use that",
        "optimizer.clip_norm": f"{{optimizer.clip_norm:g}} is not possible with {_CONTROL}: "
        "scaffold: clipped steps tell no gradient; leave it out",
        "optimizer.schedule.entrypoint": f"is not possible with {_CONTROL}: scaffold: rates must "
        "stay the same within a round",
        "optimizer.groups[].optimizer": "{optimizer.groups[].optimizer.label} "
        f"{_THE_GRADIENT_ALONE}",
        **{
            f"at {owner}.{key}: {owner}.kwargs.{key}": f"{{{owner}.kwargs.{key}}} "
            f"{_THE_GRADIENT_ALONE}"
            for owner in ("optimizer", "optimizer.groups[]")
            for key in _NOT_THE_GRADIENT
        },
    }),
    # Clients that keep something from round to round
    Rules("strategy.options.personal and no data.worker_local",
          "is not possible with strategy.options.personal and simulated clients: one worker "
          "evaluates for all, and no model is whole there; leave it out, or use "
          "data.worker_local", {"evaluation": ""}),
    Rules(_Q,
          "is not possible with q, which weighs clients by the loss of one model for all; leave "
          "one out", {
        "strategy.options.personal": "",
        "strategy.options.ditto": "",
    }),
    Rules("privacy", "is not possible with privacy: no accountant here counts what a client keeps",
          {f"strategy.options.{name}": "" for name in _CLIENTS_KEEP}),
    # Updates that nobody sees
    Rules("strategy.options.secure_aggregation", "is not possible with secure_aggregation{}", {
        "compression when compression.codec is not none": ", which sends whole numbers under masks",
        "privacy": ": noise is added where the updates are seen, and they are seen nowhere",
        "evaluation when data.worker_local": " and data.worker_local: each client's numbers would "
        "be seen; evaluate rows that all may see in a run of its own",
        "recording.client_steps": ": the steps of single clients would be seen",
    }),
)

# ---- Privacy ----
#
# A row that is protected must influence published results only through its clipped gradient. The
# rules therefore refuse everything that looks at several rows at once, publishes numbers of them,
# or decides by them, and every option of a round that is not known to see protected updates alone.

_PRIVACY: Final[Table] = (
    Rules("", "is not possible with privacy{}", {
        "evaluation when data.worker_local": " and data.worker_local: each client's numbers would "
        "be published without noise; evaluate rows that all may see in a run of its own",
        "recording.client_steps": ": the steps of single clients are not published",
        "initial.resume": ": what that run has spent is not known to this one",
    }),
    Rules("privacy.unit is client", "is not possible with privacy: {}", {
        "strategy.options.late_updates": "a late client would count in a round that it was not "
        "drawn for",
        "strategy.options.over_select": "who is fast would decide who counts",
        "at strategy.options.roster.open: strategy.options.open_roster": "of how many clients the "
        "draw is must not change",
        "strategy.options.strikes": "how clients fail would decide who can be drawn",
        "strategy.options.robust": "what one client changes in it is not bounded as a sum",
        "strategy.options.regions": "the noise is that of one sum",
        "strategy.options.inner": "a silo's change is not clipped as one",
        "compression when compression.codec is not none": "what a codec makes of a clipped change "
        "may be longer",
    }),
    checks.check_adaptive_clipping,
    Rules("privacy.unit is row", "is not possible with privacy.unit row: {}", {
        "step": "a step of one's own sees all rows of a batch at once; write a loss",
        "turns": "the budget is that of one update in each step",
        "callbacks": "what they show, and when they end a round, would tell of rows without noise",
        "accumulation": "each row's gradient is clipped, and a step adds up as many rows as are "
        "drawn",
        "compression when compression.codec is not none": "what a codec leaves out is not known to "
        "depend on noised numbers alone",
        "hyperparameter_schedule": "each step is accounted with the settings of the job",
        "data.collate": "it makes a row's batch of other rows, too",
        "at data.streams: data.is_stream": "rows are drawn one by one, out of a known number",
        "execution.mode": "{execution.mode} compiles what is computed of a batch",
        "execution.precision is Mixed|Half": "{execution.precision} scales or rounds gradients "
        "before they are clipped",
        "execution.gradient": "each row has a gradient of its own; use Full",
        "privacy.clip.adaptive": "it is for the changes of clients",
    }),
    Rules("privacy.unit is row", "{}", {
        "no privacy.noise_multiplier": "missing; with privacy.unit row it cannot be computed for "
        "all clients at once, as they have different numbers of rows; for example "
        "noise_multiplier: 1.0",
        "privacy.sampling is fixed": '"fixed" is not possible with privacy.unit row: rows are '
        'drawn by "poisson"',
        f"at loss: loss.name is not {'|'.join(PER_ROW_LOSSES)}": "{loss.name} is not the mean of a "
        "loss of each row; use an entry point, or one of "
        f"{', '.join(PER_ROW_LOSSES)} with privacy.unit row",
    }),
    checks.check_rows_protected,
)

# ---- Verification ----
#
# A segment is computed again from the committed state before it, and must end with the same bits.

_VERIFICATION: Final[Table] = (
    Rules("", "is not possible with {}", {
        "verification when execution.deterministic is false": "execution.deterministic: false, as "
        "only equal bits can be compared",
        "verification when privacy.noise is secret": "privacy.noise secret, which is drawn once",
        "verification when strategy.type is PopulationBased and strategy.options.asynchronous":
        "asynchronous members, as timing decides who is copied",
    }),
    Rules("strategy.type is Federated",
          "is not possible with {}; verify the run after its end, with stratagem verify", {
        "verification when data.worker_local": "data.worker_local, rows that no other worker has",
        "verification when privacy": "privacy, as a round that is trained again has its price",
        "verification when strategy.options.secure_aggregation": "secure_aggregation: a client's "
        "secrets are on its own worker",
        "verification when strategy.options.roster.open": "an open roster, as only its own worker "
        "trains a client",
    }),
)

TRAINING: Final[Table] = (
    *_LENGTH,
    *_STEPS,
    *_POPULATION,
    checks.check_client_records,
    Rules("no strategy.type is Federated", _FEDERATED_ONLY, {"privacy": ""}),
    Under("strategy.type is Federated", _FEDERATIONS),
    Under("privacy and strategy.type is Federated", _PRIVACY),
    Under("verification", _VERIFICATION),
    Under("data.is_stream", STREAM),
    checks.check_graph_strategy,
)

# ---- Jobs that are submitted ----
#
# A strategy has these rules for the job that is submitted with it. Jobs of before may break them,
# and so may those of members and clients that are made from a job; where they run, the coordinator
# asks again.

REPLICAS: Final[Table] = (
    Rules("strategy.type is DataParallel", "{}", {
        "strategy.num_replicas > batch_size": "{strategy.num_replicas} replicas cannot share "
        "batches of {batch_size} rows; must be <= batch_size",
    }),
    checks.check_replica,
    checks.check_topology,
)
SILOS: Final[Table] = (
    Rules("strategy.type is Federated and strategy.options.inner.type is not Local|Federated",
          "{}", {
        "strategy.aggregation.method is FedProx": "FedProx changes a client's steps; with an inner "
        "strategy use FedAvg or FedYogi",
        "strategy.client_selection.method is ByCapability": "ByCapability needs clients that live "
        "on one worker; use All or Random",
        "data.worker_local": "is on single workers, and a silo is several",
        "strategy.options.late_updates": "a silo ends with its round and keeps no base of its "
        'own; use "refuse"',
        "strategy.options.on_missing_quorum": "a silo that has failed is not asked again in "
        'its round; use "fail"',
        "at strategy.options.inner: strategy.options.inner.type is PopulationBased": "a population "
        "is no client: its members end with different models",
    }),
    Rules("strategy.client_selection and strategy.options.inner.type is not Local|Federated",
          "counts rounds under Federated, and steps inside a silo; leave it out", {
        "optimizer.schedule when no optimizer.schedule.name is plateau": "",
        "optimizer.schedule.warmup_steps when optimizer.plateau": "",
        "turns[].optimizer.schedule": "",
    }),
)
REGIONS: Final[Table] = (
    Rules("strategy.type is Federated and strategy.options.inner.type is Federated", "{}", {
        "no strategy.options.regions when data.worker_local": "missing; it says which sites are in "
        "which region, for example regions: {north: [a]}",
        "evaluation when data.worker_local": "is not possible with regions of sites: who evaluates "
        "are clients on their own rows, and the clients are regions",
    }),
    Rules("strategy.type is Federated and strategy.options.inner.type is Federated",
          "follows evaluations of the whole federation, which no region sees; use another",
          {"at optimizer.schedule: optimizer.plateau": ""}),
)
MEMBERS: Final[Table] = (
    Rules("strategy.type is PopulationBased", "{}", {
        "at strategy.options.inner: strategy.options.inner.type is PopulationBased": "a population "
        "is no member: one member has one model and one score",
        "strategy.options.inner.rounds != steps_per_generation": "{strategy.options.inner.rounds} "
        "is not steps_per_generation, {steps_per_generation}; a federated member counts its steps "
        "in rounds",
    }),
)
SUBMITTED: Final[Table] = (
    checks.check_keywords, *REPLICAS, checks.check_stages, *SILOS, *REGIONS, *MEMBERS,
)

# fmt: on


# ---- Application ----


def violations_of(job: Any) -> Iterator[Violation]:
    """Yield the contradictions between a job's sections. A rule that reads an invalid field is
    skipped."""
    yield from found_in(EVERY_JOB, job)
    try:
        yield from found_in(EVALUATING if job.only_evaluates else TRAINING, job)
    except UnreadFieldError:
        return


def check_submitted(job: Any) -> Iterator[Violation]:
    """Yield the errors for which a job cannot be submitted, as far as the job alone shows."""
    if ids.are_checked() and not job.only_evaluates:
        yield from found_in(SUBMITTED, job)
