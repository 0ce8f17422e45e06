"""Build a job's model before all other plans, and check the job against model and data.

Runs in the torch thread.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError, StratagemError, Violation
from stratagem.common.base.text import CLIENT_MEAN, values_text
from stratagem.common.job import (
    ExecutionSpec,
    InitialSpec,
    JobSpec,
    OptimizerSpec,
    exchanged_codec,
    with_fields,
)
from stratagem.common.model.stages import plan_stages
from stratagem.common.process.failpoints import failpoint
from stratagem.common.schema.document import refuse
from stratagem.common.strategy import Federated, ModelParallel, Strategy
from stratagem.common.tensors.manifest import CONTROL
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.data.sources import rows_to_compare
from stratagem.worker.engine.optimizers import make_optimizer, update
from stratagem.worker.engine.state_format import (
    conversions_of,
    given_model_state,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
)
from stratagem.worker.federated.row_privacy import check_rows_apart
from stratagem.worker.models.build import FileStorage, build_shapes, checks_of_the_model
from stratagem.worker.models.nodes import check_not_shared, program_of
from stratagem.worker.models.tensors import name_of
from stratagem.worker.objectives.own_metrics import OwnMetrics
from stratagem.worker.plans.client_state import (
    check_control,
    check_personal,
    control_zeros,
    is_controlled,
    personal,
    shared,
)
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.states import freeze
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code

# ---- Build plan ----

_MODEL: Final = "model/"


def build(work: ExecutionContext, plan: pb.BuildPlan) -> pb.BuildResult:
    """Build the model from the seed, or load the job's initial state; keep it as snapshot 0."""
    work.set_activity("building")
    initial = work.job.initial
    make = work.new_inference if work.job.only_evaluates else work.new_trainer
    folder = work.host.build_dir
    built = make(fresh=initial is None, folder=folder)
    if conversion := built.setup.conversion:
        work.warn([f"execution.precision: {conversion}"])
    check_built(work.job, built.model, built.setup.num_rows)
    with checks_of_the_model():
        check_rows_apart(work.job, built.model)
        check_personal(work.job, built.model)
        check_control(work.job, built.model, built.setup.callbacks)
        check_followed_at_clients(work.job, built.setup.evaluator.own)
    if initial is not None:
        metadata = _begin_from(work, initial, built.model)
        if initial.resume:
            check_resumed_state(work.job, initial, metadata, built.num_steps)
    with nullcontext() if folder is None else FileStorage(folder):
        tensors, metadata = built.copy_state()
    if isinstance(work.job.strategy, Federated):
        tensors = shared(work.job, tensors)
        if is_controlled(work.job):
            tensors |= control_zeros(built.model)
        metadata |= averaged(built.model, tensors)
        if work.job.privacy is not None and work.job.privacy.unit == "client":
            metadata |= frozen(built.model)
    work.post(work.states.keep, work.segment, freeze(tensors, metadata))
    failpoint("worker.build.done")
    return pb.BuildResult(
        num_rows=built.setup.num_rows,
        num_parameters=sum(param.numel() for param in built.model.parameters()),
        layout_digest=layout_digest(tensors),
        structural=structural(work, built.model, plan.variants),
        rows=rows_to_compare(work.job, work.entrypoints, built.setup.data, work.numerics),
        conversion=conversion,
    )


def _begin_from(
    work: ExecutionContext, initial: InitialSpec, model: nn.Module
) -> Mapping[str, str]:
    """Load the job's initial state into the model; return the state's metadata."""
    assert initial.digest is not None  # the client has set it
    tensors, metadata = work.blob(initial.digest)
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    if converted := conversions_of(dtypes, model):
        work.warn([f"initial: {converted}"])
    given = given_model_state(tensors, model)
    if lacking := personal(work.job, model_state(model)):
        given = {**lacking, **given}  # the result of such a run lacks them
    try:
        load_model_state(model, given, where="initial")
    except InvalidInputError as error:
        if initial.trained_with is None:
            raise
        why = f"the state was trained with {values_text(initial.trained_with)}; give the job these"
        violations = [
            replace(violation, message=f"{violation.message}; {why}")
            for violation in error.violations
        ]
        raise InvalidInputError(violations=violations) from None
    return metadata


def averaged(model: nn.Module, sent: Mapping[str, Tensor]) -> dict[str, str]:
    """Return metadata with the names of the sent floating-point tensors that server optimizers must
    not change: buffers, frozen parameters and control variates. Empty if there are none."""
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    names = [
        f"{_MODEL}{name}"
        for name, tensor in model.state_dict(keep_vars=True).items()
        if tensor.is_floating_point() and name not in trained and not tensor.requires_grad
    ]
    names = [name for name in sent if name in names or name.startswith(CONTROL)]
    return {"averaged": json.dumps(sorted(names))} if names else {}


def frozen(model: nn.Module) -> dict[str, str]:
    """Return metadata with the names of parameters that clients never change, and that get no
    noise. Empty if there are none."""
    live = model.state_dict(keep_vars=True)
    names = [
        f"{_MODEL}{name}"
        for name, tensor in live.items()
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    ]
    return {"frozen": json.dumps(sorted(names))} if names else {}


def layout_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of the model's layout: name, dtype and shape of all its tensors, sorted."""
    lines = [
        f"{name.removeprefix(_MODEL)} {str(tensor.dtype).removeprefix('torch.')} "
        f"{tuple(tensor.shape)}"
        for name, tensor in sorted(tensors.items())
        if name.startswith(_MODEL)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


# ---- Checks of a built job ----
#
# These checks need the model and the data, and run after both are built, before training.

_NUM_NAMES: Final = 3
"""Maximum number of parameters named in an error message."""


def check_built(job: JobSpec, model: nn.Module, num_rows: Mapping[str, int]) -> None:
    """Check that the job's evaluation split has rows, that its codec knows the dtypes of its model,
    and that the model can be cut into its stages.

    model: the whole model. num_rows: by split. Raises InvalidInputError.
    """
    _check_split(job, num_rows)
    _check_codec(job, model)
    field, spec = _pipeline(job.strategy, "strategy")
    if spec is None:
        return
    try:
        program = program_of(model, job)
        plan = plan_stages(program, [partition.node_ids for partition in spec.partitions])
        check_not_shared(model, plan.stage_of, program)
    except InvalidInputError as error:
        violations = [
            Violation(
                f"{field}.{violation.field}"
                if "partitions" in violation.field
                else violation.field,
                violation.message,
            )
            for violation in error.violations
        ]
        raise InvalidInputError(violations=violations) from None


def check_followed_at_clients(job: JobSpec, own: OwnMetrics | None) -> None:
    """Check that each setting that follows a user's metric, with rows at separate clients, names a
    metric with one value over all rows.

    Raises InvalidInputError.
    """
    spec, strategy = job.evaluation, job.strategy
    if spec is None or own is None or job.data.worker_local is None:
        return
    if not isinstance(strategy, Federated):
        return
    plateau = None if job.optimizer is None else job.optimizer.plateau
    followed = {
        "evaluation.best": spec.best,
        "evaluation.stop.metric": spec.stop and spec.stop.metric,
        "optimizer.schedule.metric": plateau and plateau.metric,
    }
    for path, name in followed.items():
        if not name or name.endswith(f".{CLIENT_MEAN}"):
            continue
        metric = next((m for m in own.measures if f"{name}.".startswith(f"{m}.")), None)
        if metric is not None and not own.are_sums(metric):
            text = (
                f'"{name}" has no value over all rows: with data.worker_local each client measures '
                f"it on its own, and only objects whose states are sums are merged; write "
                f"{name}.{CLIENT_MEAN}"
            )
            raise InvalidInputError.at(path, text)


def check_resumed_state(
    job: JobSpec, initial: InitialSpec, metadata: Mapping[str, str], num_steps: int
) -> None:
    """Check that a state is that of the step from which the run must continue, and that steps
    remain.

    metadata: the metadata of the state, which has no step if a federation made it. num_steps: the
    number of steps of the whole training.
    """
    state_step = metadata.get("step", str(initial.step))
    if state_step != str(initial.step):
        text = f"is {initial.step}, but the state is of step {state_step}"
        raise InvalidInputError.at("initial.step", text)
    if not isinstance(job.strategy, Federated) and num_steps <= (initial.step or 0):
        name = "epochs" if job.steps is None else "steps"
        text = (
            f"{getattr(job, name)} is a training of {num_steps} steps, and the state that is "
            f"resumed has {initial.step} already; give it more"
        )
        raise InvalidInputError.at(name, text)


def _check_split(job: JobSpec, num_rows: Mapping[str, int]) -> None:
    if job.evaluation is None or job.data.worker_local is not None:
        return  # clients with separate data may have other splits
    split = job.evaluation.split
    if split not in num_rows:
        splits = ", ".join(num_rows) or "none"
        raise InvalidInputError.at("evaluation.split", f'no split "{split}"; there is {splits}')
    if not num_rows[split]:
        raise InvalidInputError.at("evaluation.split", f'"{split}" has no rows')


def _check_codec(job: JobSpec, model: nn.Module) -> None:
    spec = exchanged_codec(job.compression, job.strategy)
    others = [
        f"{name} is {name_of(param.dtype)}"
        for name, param in model.named_parameters()
        if param.requires_grad and param.dtype != torch.float32
    ]
    if spec is None or not others:
        return
    named = ", ".join(others[:_NUM_NAMES]) + (", ..." if len(others) > _NUM_NAMES else "")
    field = "strategy.options.outer_bits" if job.compression is None else "compression.codec"
    text = (
        f"{spec.codec} codes float32, and {named}; execution.precision: Single converts the model"
    )
    raise InvalidInputError.at(field, text)


def _pipeline(strategy: Strategy, field: str) -> tuple[str, ModelParallel | None]:
    """Return (path in the job, strategy) of the ModelParallel that this strategy is or runs inside;
    the strategy is None if there is none."""
    if isinstance(strategy, ModelParallel):
        return field, strategy
    inner = getattr(getattr(strategy, "options", None), "inner", None)
    return (field, None) if inner is None else _pipeline(inner, f"{field}.options.inner")


# ---- Fields that decide the structure of a state ----
#
# The fields are found by building the job with other values. Models are built on the meta device,
# optimizers over parameters of a few numbers. The structure of a state is the names, shapes and
# types of the model's tensors, which of them are trained or tied, and the optimizer's entries for
# each: an optimizer that raises over a state of the other cannot continue from it.

_META = torch.device("meta")
_NOTHING_ALLOWED = EntryPoints([])

Layout: TypeAlias = list[tuple[object, ...]]


def structural(
    work: ExecutionContext, model: nn.Module, variants: Iterable[pb.Variant]
) -> list[str]:
    """Return the names of the job's variants whose states have another structure than the job's
    state. model: the model of the job itself."""
    names: dict[str, None] = {}
    job, entrypoints = work.job, work.entrypoints
    trained = [
        (name, param.dim()) for name, param in model.named_parameters() if param.requires_grad
    ]
    own_layout: Layout | None = None
    for variant in variants:
        work.control.check()
        if variant.name in names:
            continue
        try:
            changed = with_fields(job, json.loads(variant.fields_json))
            is_other = not go_on(job.optimizer, changed.optimizer, trained, entrypoints)
            if changed.model != job.model:
                own_layout = own_layout or layout_of(job, entrypoints)
                is_other = is_other or layout_of(changed, entrypoints) != own_layout
        except StratagemError:
            continue  # a variant that cannot be built has no state to copy
        if is_other:
            names[variant.name] = None
    return list(names)


def layout_of(job: JobSpec, entrypoints: EntryPoints) -> Layout:
    """Return the layout of the model's state: for each tensor, sorted by name, a tuple of name,
    type, shape, whether it is trained, and the first name of its tied tensors.

    Raises StratagemError if the model cannot be built.
    """
    with user_code("building the model"):
        model = build_shapes(job, entrypoints, device=_META)
    first: dict[int, str] = {}
    tensors = sorted(model.state_dict(keep_vars=True).items())
    return [
        (name, tensor.dtype, tensor.shape, tensor.requires_grad, first.setdefault(id(tensor), name))
        for name, tensor in tensors
    ]


def go_on(
    one: OptimizerSpec,
    other: OptimizerSpec,
    params: Sequence[tuple[str, int]],
    entrypoints: EntryPoints = _NOTHING_ALLOWED,
) -> bool:
    """Return whether each of two optimizers can continue from the other's state. params: (name,
    number of dimensions). Raises StratagemError if one cannot be made."""
    if one == other:
        return True
    of_one, of_other = _by_group(one), _by_group(other)
    if of_one.keys() != of_other.keys():
        return False
    pairs = {(one.group_of(*param), other.group_of(*param), param[1]) for param in params}
    return all(
        _goes_on(of_one[group], of_other[others], dims, entrypoints)
        and _goes_on(of_other[others], of_one[group], dims, entrypoints)
        for group, others, dims in sorted(pairs)
    )


def _by_group(spec: OptimizerSpec) -> dict[str, OptimizerSpec]:
    """Return the optimizer of each group, with the hyperparameters of that group."""
    return {
        name: OptimizerSpec.model_validate(rule.of_group(name).document())
        for rule in spec.rules()
        for name in rule.groups
    }


def _goes_on(old: OptimizerSpec, new: OptimizerSpec, dims: int, entrypoints: EntryPoints) -> bool:
    """Return whether the new optimizer can make a step from the state of the old one."""
    before, after = _params(dims), _params(dims)
    first = make_optimizer(old, before, entrypoints=entrypoints)
    second = make_optimizer(new, after, entrypoints=entrypoints)
    update(first)
    load_optimizer_state(second, after, *optimizer_state(first, before))
    try:
        update(second)
    except Exception:  # an optimizer may raise any type for missing entries
        return False
    return True


def _params(dims: int) -> list[tuple[str, nn.Parameter]]:
    """Return stand-in parameters with these numbers of dimensions, each with a gradient."""
    param = nn.Parameter(torch.ones([2] * dims))
    param.grad = torch.ones_like(param)
    return [("weight", param)]


# ---- Supported settings ----

_SUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "parallelism": ("None",),
}


def check_supported(execution: ExecutionSpec) -> None:
    """Raise InvalidInputError, which names every setting that this worker does not support."""
    refuse(
        [
            Violation(
                f"execution.{name}",
                f"{getattr(execution, name)} is not carried out by this worker; "
                f"it does {', '.join(getattr(value, '__name__', str(value)) for value in values)}",
            )
            for name, values in _SUPPORTED.items()
            if not {getattr(execution, name), type(getattr(execution, name))} & {*values}
        ]
    )
