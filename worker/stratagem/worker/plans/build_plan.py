"""The plan that builds a model, alone and before anything else: run in the torch thread."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Final

from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.text import values_text
from stratagem.common.job import InitialSpec
from stratagem.common.process.failpoints import failpoint
from stratagem.common.strategy import Federated
from stratagem.common.tensors.manifest import CONTROL
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.data.data_sources import rows_to_compare
from stratagem.worker.engine.privacy.row_checks import check_rows_apart
from stratagem.worker.engine.step.state_format import (
    conversions_of,
    given_model_state,
    load_model_state,
    model_state,
)
from stratagem.worker.models.file_storage import FileStorage
from stratagem.worker.models.model_fit import checks_of_the_model
from stratagem.worker.plans.built_job_checks import (
    check_built,
    check_followed_at_clients,
    check_resumed_state,
)
from stratagem.worker.plans.federated.client_state import check_personal, personal, shared
from stratagem.worker.plans.federated.control_variates import (
    check_control,
    control_zeros,
    is_controlled,
)
from stratagem.worker.plans.structural_fields import structural
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.session_states import freeze

_MODEL: Final = "model/"


def build(work: ExecutionContext, plan: pb.BuildPlan) -> pb.BuildResult:
    """Build the model from the seed, or load the state that the job begins from; its state waits
    as the snapshot of segment 0."""
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
    """Load the model of the state that the job begins from; return the metadata of the state."""
    assert initial.digest is not None  # the client has found it
    tensors, metadata = work.blob(initial.digest)
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    if converted := conversions_of(dtypes, model):
        work.warn([f"initial: {converted}"])
    given = given_model_state(tensors, model)
    if lacking := personal(work.job, model_state(model)):
        given = {**lacking, **given}  # the result of such a run has none of them
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
    """Return metadata that name the floating-point tensors of those that are sent that no server
    optimizer may change.

    These are buffers, frozen parameters and control variates. Empty where there are none.
    """
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    names = [
        f"{_MODEL}{name}"
        for name, tensor in model.state_dict(keep_vars=True).items()
        if tensor.is_floating_point() and name not in trained and not tensor.requires_grad
    ]
    names = [name for name in sent if name in names or name.startswith(CONTROL)]
    return {"averaged": json.dumps(sorted(names))} if names else {}


def frozen(model: nn.Module) -> dict[str, str]:
    """Return metadata that name the parameters that no client changes: they get no noise. Empty
    where there are none."""
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
