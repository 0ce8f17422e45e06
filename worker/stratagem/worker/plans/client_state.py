"""Keep the private state of a federated client, which is read before its round and written before
its update is sent.

The module determines the private tensors of the model, and their initial values. Where the rows of
a client are at a worker, the state stays there (see `host.client_states`). The state of a simulated
client is sent to the coordinator, because its next round may be on another worker.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError, NotFoundError, UserCodeError
from stratagem.common.job import JobSpec
from stratagem.common.job.optimizer import is_matched
from stratagem.common.numerics.rules import REFUSES_INFINITE
from stratagem.common.strategy import Federated
from stratagem.common.strategy.federated import Ditto
from stratagem.common.tensors.manifest import CONTROL
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine.callbacks import Callbacks
from stratagem.worker.engine.state_format import MODEL, given_model_state, model_state
from stratagem.worker.federated.client_trainer import (
    ClientRound,
    ClientRunner,
    RoundSettings,
    Toward,
)
from stratagem.worker.host.client_states import ClientStateStore
from stratagem.worker.models.build import build_model
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.finite import diverged
from stratagem.worker.session.states import freeze

# ---- Private tensors and their storage ----

_PERSONAL_FIELD: Final = "strategy.options.personal"
_OPTIONS: Final = "strategy.options"
_NUM_NAMES: Final = 5


def is_personal(job: JobSpec, name: str) -> bool:
    """Return whether a tensor of the model, by its name in a state, is private."""
    strategy = job.strategy
    if not isinstance(strategy, Federated) or strategy.options.personal is None:
        return False
    return is_matched(name.removeprefix(MODEL), strategy.options.personal)


def shared(job: JobSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the shared tensors of a state, which are sent to the coordinator."""
    return {name: tensor for name, tensor in tensors.items() if not is_personal(job, name)}


def personal(job: JobSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the private tensors of a state, which are never sent."""
    return {name: tensor for name, tensor in tensors.items() if is_personal(job, name)}


def check_personal(job: JobSpec, model: nn.Module) -> None:
    """Check that each pattern matches a tensor, that a trained tensor remains to share, and that no
    tied tensor is both. Raises InvalidInputError."""
    strategy = job.strategy
    if not isinstance(strategy, Federated) or strategy.options.personal is None:
        return
    state = model.state_dict(keep_vars=True)
    for i, pattern in enumerate(strategy.options.personal):
        if not any(is_matched(name, (pattern,)) for name in state):
            first = ", ".join(list(state)[:_NUM_NAMES])
            text = f"{pattern!r} fits no tensor of the model; the first are {first}"
            raise InvalidInputError.at(f"{_PERSONAL_FIELD}[{i}]", text)
    kinds: dict[int, tuple[bool, str]] = {}
    for name, tensor in state.items():
        is_own = is_personal(job, name)
        other = kinds.setdefault(id(tensor), (is_own, name))
        if other[0] != is_own:
            text = f"{name} and {other[1]} are one tensor, and only one of the names fits a pattern"
            raise InvalidInputError.at(_PERSONAL_FIELD, text)
    if not any(t.requires_grad and not is_personal(job, n) for n, t in state.items()):
        text = "fits all that is trained, so the clients would share nothing"
        raise InvalidInputError.at(_PERSONAL_FIELD, text)


@dataclass(frozen=True, slots=True)
class RoundStart:
    """A client's state at the beginning of its round."""

    start: Mapping[str, Tensor]
    """The shared tensors of the model, whose change is sent."""
    own: Mapping[str, Tensor]
    """The client's private tensors: a part of the model, or a whole model of its own."""
    lost: str = ""
    """The reason why the state that the plan names is missing; "" if it is not."""


def kept_state(
    work: ExecutionContext, plan: pb.ClientRoundPlan, base: Mapping[str, Tensor]
) -> RoundStart:
    """Return the client's kept state, else its initial one. base: the global state."""
    if not _keeps(work.job):
        return RoundStart(base, {})
    private, lost = None, ""
    if plan.state.digest:
        try:
            private = _load(work, plan.client, plan.state)
        except NotFoundError as error:
            lost = str(error)
    elif is_at_worker(work.job):
        _store(work)  # refuse before anything is trained
    if _ditto(work.job) is not None:
        return RoundStart(base, base if private is None else private, lost)
    if is_controlled(work.job):
        return RoundStart(base, control_begun(base) if private is None else private, lost)
    private = _beginning(work) if private is None else private
    return RoundStart({**base, **private}, private, lost)


def own_model(
    work: ExecutionContext,
    runner: ClientRunner,
    plan: pb.ClientRoundPlan,
    base: Mapping[str, Tensor],
    kept: RoundStart,
) -> Mapping[str, Tensor]:
    """Train the client's own model, if it has one, near the global state; return it."""
    ditto = _ditto(work.job)
    if ditto is None:
        return {}
    done = runner.run(
        kept.own,
        plan.client,
        plan.num_clients,
        work.segment,
        work.control.check,
        settings=RoundSettings(plan.num_lr_reductions, toward=Toward(base, ditto.lambda_)),
    )
    return done.tensors


def state_to_evaluate(
    work: ExecutionContext, client: int, ref: pb.ClientStateRef
) -> Mapping[str, Tensor]:
    """Return a client's private state for an evaluation. Raises InvalidInputError if it is lost."""
    if not ref.digest:
        return {}
    try:
        return _load(work, client, ref)
    except NotFoundError as error:
        raise InvalidInputError.at(_OPTIONS, str(error)) from None


def keep(
    work: ExecutionContext,
    done: ClientRound,
    plan: pb.ClientRoundPlan,
    model: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    kept: RoundStart,
) -> tuple[ClientRound, str]:
    """Write the client's private state; return the round as it is sent, and the digest of the state
    if it is kept here.

    model: the client's own model, if it has one. base: the global state. kept: the state at the
    beginning of the round. Raises InvalidInputError if it cannot be written, UserCodeError if it is
    not finite.
    """
    job = work.job
    if not _keeps(job):
        return done, ""
    private = model or personal(job, done.tensors)
    if is_controlled(job):
        private, changed = control_moved(base, kept.own, done)
        done = replace(done, tensors={**done.tensors, **changed})
    numbers = {n: t for n, t in private.items() if n in done.trained or not n.startswith(MODEL)}
    is_checked = work.numerics >= REFUSES_INFINITE
    if is_checked and (name := diverged(numbers, {}, lambda: {**base, **kept.own})):
        text = (
            f"{name!r}, which client {plan.client} keeps to itself, has left the range of "
            f"{str(private[name].dtype).removeprefix('torch.')}; lower optimizer.lr"
        )
        raise UserCodeError("FloatingPointError", text, activity=f"round {work.segment}")
    digest = ""
    if is_at_worker(job):
        of_round = work.key.run_id, plan.client, work.segment
        digest = _store(work).save(*of_round, private, plan.kept_rounds)
    else:
        copies = {name: tensor.detach().cpu().contiguous() for name, tensor in private.items()}
        work.post(work.states.keep_outputs, work.segment, freeze(copies, {}))
    if model or is_controlled(job):
        return done, digest
    trained = frozenset(name for name in done.trained if name not in private)
    return replace(done, tensors=shared(job, done.tensors), trained=trained), digest


def _keeps(job: JobSpec) -> bool:
    return isinstance(job.strategy, Federated) and job.strategy.options.has_client_state


def is_at_worker(job: JobSpec) -> bool:
    """Return whether the private state of a client is only on its worker."""
    return job.data.worker_local is not None


def _ditto(job: JobSpec) -> Ditto | None:
    return job.strategy.options.ditto if isinstance(job.strategy, Federated) else None


def _store(work: ExecutionContext) -> ClientStateStore:
    if work.host.client_states is None:
        text = f"worker {work.host.worker_id} keeps nothing for its clients: it has no --data-dir"
        raise InvalidInputError.at(_OPTIONS, text)
    return work.host.client_states


def _load(work: ExecutionContext, client: int, ref: pb.ClientStateRef) -> Mapping[str, Tensor]:
    if not is_at_worker(work.job):
        return work.blob(ref.digest)[0]
    return _store(work).load(work.key.run_id, client, ref.round, ref.digest)


def _beginning(work: ExecutionContext) -> dict[str, Tensor]:
    """Return the initial private state, equal for all clients: from the job's initial state, or the
    model built from the seed."""
    model = build_model(work.job, work.entrypoints, device=torch.device("cpu"), fresh=True)
    private = personal(work.job, model_state(model))
    initial = work.job.initial
    if initial is not None and initial.digest is not None:
        given = given_model_state(work.blob(initial.digest)[0], model)
        private |= {name: given[name] for name in private.keys() & given.keys()}
    return private


# ---- Control variates ----
#
# SCAFFOLD, option II (Karimireddy et al., 2020, arXiv:1910.06378). The global state holds c beside
# the model, each client keeps c_k, and both begin at zero. A client takes K steps of rate lr with c
# - c_k added to its gradient, from x to y; then
#
#     c_k+ = c_k - c + (x - y) / (K lr)        Δc = c_k+ - c_k
#
# in float64, each rounded once, so that c_k+ is the client's mean gradient in the round. Δc goes
# with the update. Tensors are named `control/` and the parameter; tied parameters have one.

_CONTROL_FIELD: Final = "strategy.options.control"
_EXACT: Final = (torch.float32, torch.float64)


def is_controlled(job: JobSpec) -> bool:
    """Return whether the job corrects the steps of clients by control variates."""
    return isinstance(job.strategy, Federated) and job.strategy.options.control is not None


def check_control(job: JobSpec, model: nn.Module, callbacks: Callbacks) -> None:
    """Check that the control variates of this job can be computed: steps must reveal the gradient,
    which nothing else changes. Raises InvalidInputError."""
    if not is_controlled(job):
        return
    if callbacks.takes_gradients:
        text = "scaffold measures gradients by steps, and on_gradients of callbacks changes them"
        raise InvalidInputError.at(_CONTROL_FIELD, f"{text}; leave one out")
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype not in _EXACT:
            text = f"{name} is {param.dtype}, whose steps are too coarse to measure a gradient by"
            raise InvalidInputError.at(_CONTROL_FIELD, f"{text}; float32 and float64 are not")


def control_zeros(model: nn.Module) -> dict[str, Tensor]:
    """Return zeros as the initial c (the server's control variate) of each trained parameter."""
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {f"{CONTROL}{n}": torch.zeros_like(p, device="cpu").detach() for n, p in trained}


def control_begun(base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the initial c_k (a client's control variate). base: a global state."""
    return {name: torch.zeros_like(base[name]) for name in _names(base)}


def correction(base: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return c - c_k, which is added to the gradient of each parameter. own: c_k."""
    return {name.removeprefix(CONTROL): base[name] - own[name] for name in own}


def control_moved(
    base: Mapping[str, Tensor], own: Mapping[str, Tensor], done: ClientRound
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (c_k after the round, Δc). c_k stays if all learning rates were zero."""
    moved, changed = {}, {}
    for name in _names(base):
        before, param = own[name], name.removeprefix(CONTROL)
        reach = done.reach[param]
        if reach:
            way = base[f"{MODEL}{param}"].double() - done.tensors[f"{MODEL}{param}"].double()
            moved[name] = (before.double() - base[name].double() + way / reach).to(before.dtype)
        else:
            moved[name] = before.clone()
        changed[name] = (moved[name].double() - before.double()).to(before.dtype)
    return moved, changed


def _names(tensors: Iterable[str]) -> list[str]:
    return [name for name in tensors if name.startswith(CONTROL)]
