"""Checks of a job that need its model and its data; made once both are built, before training."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import nn

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.job import InitialSpec, JobSpec, exchanged_codec
from stratagem.common.job.fields import CLIENT_MEAN
from stratagem.common.model.stages import plan_stages
from stratagem.common.strategy import Federated, ModelParallel, Strategy
from stratagem.worker.engine.objectives.own_metrics import OwnMetrics
from stratagem.worker.models.model_dtypes import name_of
from stratagem.worker.models.model_nodes import check_not_shared, program_of

_NUM_NAMES: Final = 3
"""How many parameters a refusal lists."""


def check_built(job: JobSpec, model: nn.Module, num_rows: Mapping[str, int]) -> None:
    """Check that the job's evaluation split has rows, that its codec knows the dtypes of its model,
    and that this can be cut into its stages.

    model: the whole of it. num_rows: of each split. Raises InvalidInputError.
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
    """Check that what follows a metric of the user's own over rows that are nowhere together names
    one that has a value over all of them.

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
    """Check that a state is of the step from which the run is to go on, and that steps are left.

    metadata: of the state; that of a federation says no step. num_steps: of the whole training.
    """
    found = metadata.get("step", str(initial.step))
    if found != str(initial.step):
        text = f"is {initial.step}, but the state is of step {found}"
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
        return  # clients with data of their own may have other splits
    split = job.evaluation.split
    if split not in num_rows:
        known = ", ".join(num_rows) or "none"
        raise InvalidInputError.at("evaluation.split", f'no split "{split}"; there is {known}')
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
    """Return the pipeline that the strategy or its replicas are, if any, and its field's path."""
    if isinstance(strategy, ModelParallel):
        return field, strategy
    inner = getattr(getattr(strategy, "options", None), "inner", None)
    return (field, None) if inner is None else _pipeline(inner, f"{field}.options.inner")
