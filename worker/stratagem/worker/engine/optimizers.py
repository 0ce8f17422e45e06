"""Make optimizers by their torch.optim names or by entry point, run their updates, and clip
gradients.

torch's optimizers step each parameter tensor by itself (foreach is off, and fused kernels keep to
one tensor too). So an update has the same bits whatever other parameters there are and however many
threads run. The user's own optimizers are called as their entry point makes them. The module does
not know where gradients come from.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.optim.sgd import sgd

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec, OptimizerSpec, WeightAverageSpec, check_optimizer
from stratagem.common.job.optimizer import KEYWORDS, GroupedRule, UpdateRuleSpec
from stratagem.worker.numerics.deferred_compiler import defer_compiler
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code

# ---- Average of the weights ----
#
# The average is exponential, or the mean over the steps of a run. It is a pure function of the
# parameters after each applied step, so all members that hold the same parameters hold the same
# average.

AVERAGE: Final = "average/"
"""Prefix of the names of the averaged parameters in a state."""
_NUM_AVERAGED: Final = "num_averaged"
State = tuple[dict[str, Tensor], dict[str, str]]
"""A state: (tensors by name, metadata)."""


class WeightAverage:
    """Running average of the parameters, in their own dtype; empty before its first update.

    It has the same bits as torch.optim.swa_utils.AveragedModel. Buffers are not averaged: a model
    with averaged parameters has the present buffers. Used by one thread.
    """

    def __init__(self, spec: WeightAverageSpec, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Begin without an average. params: those to average, by their names in a state."""
        self._spec, self._params = spec, list(params)
        self._means: list[Tensor] = []
        self._num_averaged = 0

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the parameters to the average if an update is due after step `step` (from 1)."""
        if not self._spec.is_due(step):
            return
        if self._num_averaged == 0:
            self._means = [param.detach().clone() for _, param in self._params]
        else:
            weight = self._spec.weight(self._num_averaged)
            for mean, (_, param) in zip(self._means, self._params, strict=True):
                mean.lerp_(param, weight)
        self._num_averaged += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager that swaps the average into the parameters, if there is one."""
        if not self._means:
            yield
            return
        live = [param.detach().clone() for _, param in self._params]
        self._write(self._means)
        try:
            yield
        finally:
            self._write(live)

    def state(self, names: Iterable[str] | None = None) -> State:
        """Return (live tensors by name, metadata); empty before the first update. names: the
        parameters whose averages are returned; None for all."""
        if not self._means:
            return {}, {}
        wanted = None if names is None else {*names}
        named = zip(self._params, self._means, strict=True)
        tensors = {
            f"{AVERAGE}{name}": mean
            for (name, _), mean in named
            if wanted is None or name in wanted
        }
        return tensors, {f"{AVERAGE}{_NUM_AVERAGED}": str(self._num_averaged)}

    def load(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Load the result of `state`; a state without an average resets to no update."""
        self._num_averaged = int(metadata.get(f"{AVERAGE}{_NUM_AVERAGED}", "0"))
        self._means = []
        if self._num_averaged:
            self._means = [_copy_of(f"{AVERAGE}{n}", p, tensors) for n, p in self._params]

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for (_, param), value in zip(self._params, values, strict=True):
            param.copy_(value)


def average_of(job: JobSpec, params: Sequence[tuple[str, nn.Parameter]]) -> WeightAverage | None:
    """Return the average of these parameters that the job asks for; None if it asks for none."""
    return None if job.weight_average is None else WeightAverage(job.weight_average, params)


def evaluated(job: JobSpec, average: WeightAverage | None) -> AbstractContextManager[None]:
    """Context manager in which parameters have their averages, if the job evaluates these."""
    if average is None or job.evaluation is None or job.evaluation.of != "average":
        return nullcontext()
    return average.in_place()


def _copy_of(name: str, param: nn.Parameter, tensors: Mapping[str, Tensor]) -> Tensor:
    given = tensors.get(name)
    if given is None or (given.shape, given.dtype) != (param.shape, param.dtype):
        problem = "missing" if given is None else f"is {given.dtype} {tuple(given.shape)}"
        text = f"{problem}; the parameter is {param.dtype} {tuple(param.shape)}"
        raise InvalidInputError.at(f"state.{name}", text)
    return torch.empty_like(param, requires_grad=False).copy_(given)


# ---- SGD with momentum that begins late ----
#
# A branch of a model that only some batches take gets its first gradient late. Its momentum then
# begins with that gradient, as in torch's SGD of one tensor at a time; the kernel that does a whole
# update at once needs all momenta or none, and raises.

_PASSED = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")


class SGD(torch.optim.SGD):
    """Stochastic gradient descent with the updates, bits and state of torch.optim.SGD."""

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        momentum_buffer_list: list[Tensor | None],
    ) -> bool:
        """Fill the lists with the tensors to update together; if only some parameters have no
        momentum yet, update these at once."""
        lists: tuple[list[Any], ...] = (params, grads, momentum_buffer_list)
        has_sparse = bool(super()._init_group(group, *lists))  # type: ignore[no-untyped-call]
        if not (group["fused"] and group["momentum"]):
            return has_sparse
        late = [i for i, momentum in enumerate(momentum_buffer_list) if momentum is None]
        others = [i for i, momentum in enumerate(momentum_buffer_list) if momentum is not None]
        if len(late) in (0, len(params)):
            return has_sparse
        late_params, own_grads, momenta = ([values[i] for i in late] for values in lists)
        further = {key: group[key] for key in _PASSED}
        sgd(late_params, own_grads, momenta, has_sparse, False, True, **further)
        for param, momentum in zip(late_params, momenta, strict=True):
            self.state[param]["momentum_buffer"] = momentum
        for entries in lists:
            entries[:] = [entries[i] for i in others]
        return has_sparse


# ---- Optimizers ----

defer_compiler()

_OPTIMIZERS: Final[Mapping[str, type[torch.optim.Optimizer]]] = {
    name.lower(): SGD if kind is torch.optim.SGD else kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    if name.lower() in KEYWORDS
}
_KINDS: Final[tuple[type[torch.optim.Optimizer], ...]] = (*_OPTIMIZERS.values(), torch.optim.SGD)
_BARE_STEPS: Final[Mapping[type, Callable[[torch.optim.Optimizer], object]]] = {
    kind: inspect.unwrap(kind.step) for kind in _KINDS
}
NamedParams: TypeAlias = Sequence[tuple[str, nn.Parameter]]
GROUP: Final = "group"
"""The key under which a parameter group keeps its name in the job."""
_REQUIRED: Final = inspect.Parameter.empty
_OPTIONAL: Final = inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)
_NOTHING_ALLOWED: Final = EntryPoints([])


class OptimizersInOrder(torch.optim.Optimizer):
    """Several optimizers of different parameters combined into one, which steps each in turn.

    It has all their groups, the defaults of the first one, and one `state` shared by all.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts, self.defaults = parts, parts[0].defaults
        self._keep_state_in(self.state)

    def _keep_state_in(self, state: Any) -> None:
        """Make all parts, also nested ones, keep their state in this dict."""
        self.state = state
        for part in self.parts:
            state.update(part.state)
            if isinstance(part, OptimizersInOrder):
                part._keep_state_in(state)
            part.state = state

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Make one step of each of the combined optimizers, in order."""
        for part in self.parts:
            part.step()


def make_optimizer(
    spec: OptimizerSpec,
    params: Iterable[tuple[str, nn.Parameter]],
    *,
    fused: bool = False,
    entrypoints: EntryPoints = _NOTHING_ALLOWED,
) -> torch.optim.Optimizer:
    """Return a new optimizer over these parameters, sorted into the groups that the job defines.

    On the CPU, torch's optimizers use their fused kernels where these are deterministic; fused:
    also on other devices. Fused kernels give other bits, but these depend only on the tensor, too.
    """
    if violations := list(check_optimizer(spec)):
        raise InvalidInputError(violations=violations)
    of_group: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, param in params:
        of_group.setdefault(spec.group_of(name, param.dim()), []).append((name, param))
    parts = []
    for part in spec.rules():
        members = {name: of_group[name] for name in part.groups if name in of_group}
        if members:
            parts.append(make_part(part, members, fused=fused, entrypoints=entrypoints))
    return parts[0] if len(parts) == 1 else OptimizersInOrder(parts)


def make_part(
    each: GroupedRule,
    members: Mapping[str, NamedParams],
    *,
    fused: bool = False,
    entrypoints: EntryPoints = _NOTHING_ALLOWED,
) -> torch.optim.Optimizer:
    """Make one optimizer for the given parameters, keyed by group.

    A group of a torch optimizer gets all hyperparameters; a group of a user's optimizer only those
    that the job sets, since other keywords may not be valid for groups.
    """
    rule, has_groups = each.rule, len(each.groups) > 1
    params = [pair for pairs in members.values() for pair in pairs]
    given: Any = [param for _, param in params]
    if has_groups:
        given = [
            {
                "params": [param for _, param in pairs],
                **_keywords(each.of_group(name, with_shared=rule.name is not None)),
            }
            for name, pairs in members.items()
        ]
    if rule.name is None:
        optimizer = _users_optimizer(each.path, rule, given, params, entrypoints)
    else:
        optimizer = _torchs(each.path, rule, given, params, fused=fused)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    if len(optimizer.param_groups) == len(members):  # the user's may have made others
        for group, name in zip(optimizer.param_groups, members, strict=True):
            group[GROUP] = name
    return optimizer


def _torchs(
    path: str, rule: UpdateRuleSpec, given: Any, params: NamedParams, *, fused: bool
) -> torch.optim.Optimizer:
    kind = _OPTIMIZERS[rule.label.lower()]
    arguments = inspect.signature(kind).parameters
    kwargs = _keywords(rule)
    if "foreach" in arguments:
        kwargs["foreach"] = False
    if "fused" in arguments and not kwargs.get("differentiable"):
        kwargs["fused"] = fused or _is_fused_on_cpu(kind, kwargs, given, params)
    try:
        return kind(given, **kwargs)
    except (ValueError, TypeError) as error:
        raise InvalidInputError.at(path, f"{rule.label}: {error}") from error


def _is_fused_on_cpu(
    kind: type[torch.optim.Optimizer],
    kwargs: Mapping[str, Any],
    given: Any,
    params: NamedParams,
) -> bool:
    """Return whether torch's fused CPU kernel is deterministic. With momentum in 16 bits it is not:
    its rounding depends on memory addresses."""
    if not all(p.is_cpu and p.is_floating_point() for _, p in params):
        return False
    groups = [group for group in given if isinstance(group, dict)]
    has_momentum = any(options.get("momentum") for options in (kwargs, *groups))
    is_narrow = any(p.itemsize < 4 for _, p in params)
    return not (kind is SGD and has_momentum and is_narrow)


def _users_optimizer(
    path: str, rule: UpdateRuleSpec, given: Any, params: NamedParams, entrypoints: EntryPoints
) -> torch.optim.Optimizer:
    """Make an optimizer by the user's entry point. Raises InvalidInputError if it is unusable."""
    field, name = f"{path}.entrypoint", rule.label
    make = entrypoints.resolve(name, field)
    with user_code("making the optimizer"):
        made = make(given, **_keywords(rule))
    if not isinstance(made, torch.optim.Optimizer):
        text = f'"{name}" returned a {type(made).__name__}, not a torch.optim.Optimizer'
        raise InvalidInputError.at(field, text)
    if inspect.signature(made.step).parameters.get("closure", _OPTIONAL).default is _REQUIRED:
        text = f'"{name}" makes a {type(made).__name__}, whose step computes the loss itself, '
        why = "as often as it likes; here a step has one gradient, of the rows of all workers"
        raise InvalidInputError.at(field, f"{text}{why}")
    held = {id(param) for group in made.param_groups for param in group["params"]}
    if idle := [param_name for param_name, param in params if id(param) not in held]:
        text = f'"{name}" made an optimizer that leaves out {idle[0]!r}; freeze what is not trained'
        raise InvalidInputError.at(field, text)
    if not all("lr" in group for group in made.param_groups):
        raise InvalidInputError.at(field, f'"{name}" made groups without "lr"')
    return made


def _keywords(spec: UpdateRuleSpec) -> dict[str, Any]:
    """Return the optimizer's keyword arguments in torch's form."""
    kwargs: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list | tuple) else value
        for key, value in spec.kwargs.items()
    }
    return {**kwargs, "lr": spec.lr}


def update(optimizer: torch.optim.Optimizer) -> None:
    """Make one step of the optimizer, with the bits of `optimizer.step()` but less overhead.

    torch adds a profiler label, hooks and mode switches to each step, which take longer than the
    update of a small model. They are skipped if nothing is recorded and no hook is registered.
    """
    if isinstance(optimizer, OptimizersInOrder):
        for part in optimizer.parts:
            update(part)
        return
    bare = _BARE_STEPS.get(type(optimizer))
    if (
        bare is None
        or torch._C._autograd._profiler_enabled()
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer.defaults.get("differentiable")
    ):
        optimizer.step()
        return
    with torch.no_grad():
        bare(optimizer)


def clip(params: Sequence[Tensor], max_norm: float | None, norm: Tensor) -> None:
    """Scale all gradients so that their joint 2-norm, now `norm` (0-d), is at most `max_norm`."""
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach=False)
