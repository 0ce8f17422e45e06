"""This module defines the sections `optimizer`, `weight_average` and `turns` of a job.

Each section checks itself, except the keyword arguments of optimizers: those of a population's
member are valid or not only once its hyperparameters have been drawn.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from stratagem.common.base import ids
from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.job.schedules import ScheduleSpec
from stratagem.common.schema.document import (
    Count,
    EntrypointName,
    Items,
    Kwargs,
    Name,
    NonEmptyText,
    Positive,
    Section,
    Whole,
    colon_hint,
    one_of,
    refuse,
)
from stratagem.common.schema.json import FrozenDict, not_one_of, suggest
from stratagem.common.schema.rules import rule

# ---- Section ----
#
# The section names an optimizer of torch, or one of the user's by entry point, and groups of
# parameters with values of their own.

MAX_GROUPS: Final = 64
_NUM_NAMES: Final = 5
"""The largest number of parameter names that an error message lists."""
DEFAULT_GROUP: Final = "default"
_RESERVED: Final = (
    *("params", "name", "entrypoint", "lr"),
    *("kwargs", "schedule", "clip_norm", "groups", "optimizer"),
)


def _check_optimizer_name(value: str) -> str:
    if value.lower() not in KEYWORDS and ids.are_checked():
        raise InvalidInputError(not_one_of(value, sorted(KEYWORDS)) + colon_hint(value))
    return value


class UpdateRuleSpec(Section):
    """An optimizer: one of torch's by name, or the user's own by entry point. Further keys are its
    keyword arguments, kept in `kwargs`."""

    name: Annotated[Name, AfterValidator(_check_optimizer_name), Field(examples=["sgd"])] | None = (
        None
    )
    entrypoint: EntrypointName | None = None
    lr: Annotated[Positive, Field(examples=[0.1])]
    kwargs: Kwargs = FrozenDict()

    @model_validator(mode="before")
    @classmethod
    def _gather_kwargs(cls, value: object) -> object:
        return _gathered(cls, value)

    @rule
    def _one_source(self) -> Iterable[Violation]:
        return one_of(self, ("name", "entrypoint"))

    @property
    def label(self) -> str:
        """Return the name, or the entry point, for people."""
        return self.name or str(self.entrypoint)


class GroupSpec(Section):
    """A group of parameters with its own learning rate, keyword arguments or optimizer. Further
    keys are keyword arguments, kept in `kwargs`.

    match: patterns of parameter names, of which at least one must match, such as "*.bias".
    max_dims: the largest number of dimensions of a parameter. If both are given, both conditions
    must hold. lr: by default that of the optimizer; the schedule multiplies it.
    """

    name: Name
    match: Items[NonEmptyText] | None = None
    max_dims: Whole | None = None
    lr: Positive | None = None
    kwargs: Kwargs = FrozenDict()
    optimizer: UpdateRuleSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _gather_kwargs(cls, value: object) -> object:
        return _gathered(cls, value)

    @rule
    def _says_which(self) -> Iterator[Violation]:
        if not self.match and self.max_dims is None:
            yield Violation(
                "match", "missing; a group needs match or max_dims, for example match: ['*.bias']"
            )

    @rule
    def _is_not_the_default(self) -> Iterator[Violation]:
        if self.name == DEFAULT_GROUP:
            text = f"{self.name!r} is the group of all parameters that are in no other"
            yield Violation("name", text)

    @rule
    def _has_one_optimizer(self) -> Iterator[Violation]:
        if self.optimizer is not None:
            for key in [*(["lr"] if self.lr is not None else []), *self.kwargs]:
                text = "belongs into the group's optimizer, which has values of its own"
                yield Violation(key, text)

    def holds(self, name: str, num_dims: int) -> bool:
        """Return whether a parameter of this name and number of dimensions belongs to the group."""
        is_small = self.max_dims is None or num_dims <= self.max_dims
        return is_small and (not self.match or is_matched(name, self.match))


class OptimizerSpec(UpdateRuleSpec):
    """The optimizer of a job, with its schedule and groups of parameters.

    The keyword arguments of torch's optimizers are checked against their signatures where torch is
    installed. groups: each parameter belongs to the first group that matches it; the optimizer's
    own values apply to the others.
    """

    schedule: ScheduleSpec | None = None
    clip_norm: Positive | None = None
    groups: Annotated[Items[GroupSpec], Field(max_length=MAX_GROUPS)] | None = None

    @rule
    def _groups_differ(self) -> Iterator[Violation]:
        names = [group.name for group in self.groups or ()]
        for i, name in enumerate(names):
            if name in names[:i]:
                yield Violation(f"groups[{i}].name", f"{name!r} is the name of an earlier group")

    @property
    def plateau(self) -> ScheduleSpec | None:
        """Return the learning-rate schedule if it follows evaluations (plateau), else None."""
        schedule = self.schedule
        return schedule if schedule is not None and schedule.name == "plateau" else None

    def group_of(self, name: str, num_dims: int) -> str:
        """Return the name of the first group that holds a parameter, or DEFAULT_GROUP."""
        held = (group.name for group in self.groups or () if group.holds(name, num_dims))
        return next(held, DEFAULT_GROUP)

    def rules(self) -> Iterator["GroupedRule"]:
        """Yield the optimizers in the order in which they step, each with its groups."""
        sharing = [group for group in self.groups or () if group.optimizer is None]
        values = {group.name: (group.lr or self.lr, group.kwargs) for group in sharing}
        yield GroupedRule("optimizer", self, {DEFAULT_GROUP: (self.lr, FrozenDict()), **values})
        for place, group in enumerate(self.groups or ()):
            if (rule := group.optimizer) is not None:
                path = f"optimizer.groups[{place}].optimizer"
                yield GroupedRule(path, rule, {group.name: (rule.lr, FrozenDict())})


@dataclass(frozen=True, slots=True)
class GroupedRule:
    """An optimizer with the groups that it updates."""

    path: str
    """The path of the section that names the optimizer."""
    rule: UpdateRuleSpec
    groups: Mapping[str, tuple[float, Mapping[str, Any]]]
    """The learning rate and the group's own keywords, keyed by group name."""

    def of_group(self, name: str, *, with_shared: bool = True) -> UpdateRuleSpec:
        """Return the optimizer with the values of one group. with_shared: also with the keywords
        that apply to all groups."""
        (lr, kwargs), rule = self.groups[name], self.rule
        whole = FrozenDict({**(rule.kwargs if with_shared else {}), **kwargs})
        return UpdateRuleSpec(name=rule.name, entrypoint=rule.entrypoint, lr=lr, kwargs=whole)


def check_optimizer(spec: OptimizerSpec) -> Iterator[Violation]:
    """Yield an error for each optimizer or keyword that torch does not know, and each value of a
    wrong type. Entry points are not checked, since their arguments are not known here."""
    yield from _check_rule(spec, "optimizer")
    for place, group in enumerate(spec.groups or ()):
        path = f"optimizer.groups[{place}]"
        if group.optimizer is None:
            yield from _check_keywords(spec.name, group.kwargs, path)
        else:
            yield from _check_rule(group.optimizer, f"{path}.optimizer")


def _check_rule(rule: UpdateRuleSpec, path: str) -> Iterator[Violation]:
    if rule.name is not None and rule.name.lower() not in KEYWORDS:
        yield Violation(f"{path}.name", not_one_of(rule.name, sorted(KEYWORDS)))
    fields = [field for field in type(rule).model_fields if field != "kwargs"]
    yield from _check_keywords(rule.name, rule.kwargs, path, fields)


def _check_keywords(
    name: str | None, kwargs: Mapping[str, Any], path: str, fields: Sequence[str] = ()
) -> Iterator[Violation]:
    """Yield an error for each keyword that the optimizer does not take, and each value of a wrong
    type. fields: further keys that the section itself has."""
    keywords = KEYWORDS.get((name or "").lower())
    for key, value in kwargs.items():
        if keywords is not None and key not in keywords:
            allowed = ", ".join(sorted(keywords))
            text = f"{value!r}, but {name} takes no {key!r}{suggest(key, (*keywords, *fields))}"
            yield Violation(f"{path}.{key}", f"{text}; it takes {allowed}")
        elif keywords is not None and (why := why_no_value((name or "").lower(), key, value)):
            yield Violation(f"{path}.{key}", why)


def check_groups(spec: OptimizerSpec, params: Iterable[tuple[str, int]]) -> None:
    """Raise InvalidInputError if a group matches none of the model's trained parameters. params:
    names and numbers of dimensions, of the whole model; a member of a pipeline may have none of
    some groups."""
    parameters = list(params)
    held = {spec.group_of(name, num_dims) for name, num_dims in parameters}
    refuse(
        [
            Violation(f"optimizer.groups[{i}]", _why_empty(spec, group, parameters))
            for i, group in enumerate(spec.groups or ())
            if group.name not in held
        ]
    )


def _why_empty(spec: OptimizerSpec, group: GroupSpec, params: Sequence[tuple[str, int]]) -> str:
    """Return the error message, which lists parameters, for a group that matches none."""
    asked = [f"match {', '.join(map(repr, group.match))}"] if group.match else []
    asked += [] if group.max_dims is None else [f"max_dims {group.max_dims}"]
    text = f"{group.name!r} holds no trained parameter: {' and '.join(asked)} "
    matched = [name for name, num_dims in params if group.holds(name, num_dims)]
    if matched:
        owner = next(spec.group_of(name, dims) for name, dims in params if name == matched[0])
        return f"{text}fits {_listed(matched)}, which group {owner!r} before it holds"
    return f"{text}fits none; they are {_listed([name for name, _ in params]) or 'none'}"


def _listed(names: Sequence[str]) -> str:
    """Return the first few names as text, and the number of those left out."""
    more = len(names) - _NUM_NAMES
    return ", ".join(names[:_NUM_NAMES]) + (f" and {more} more" if more > 0 else "")


def is_matched(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a parameter's name fits any of these patterns, such as "encoder.*"."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _gathered(cls: type[Section], value: object) -> object:
    """Return the plain values of a section with its unknown keys moved into `kwargs`."""
    if not isinstance(value, Mapping):
        return value
    fields = {key: item for key, item in value.items() if key in cls.model_fields}
    further = {key: item for key, item in value.items() if key not in cls.model_fields}
    given: Any = fields.get("kwargs", {})
    if not isinstance(given, Mapping):
        return value
    violations = [Violation(key, "is also in kwargs") for key in further if key in given]
    violations += [
        Violation(f"kwargs.{key}", "is not a keyword of torch's here")
        for key in _RESERVED
        if key in given
    ]
    violations += [
        Violation(key, "come from the model" if key == "params" else "belongs to the optimizer")
        for key in further
        if key in _RESERVED
    ]
    refuse(violations)
    return {**fields, "kwargs": {**given, **further}}


# ---- Table of optimizers ----
#
# The table lists the optimizers and the keyword arguments that each takes, for places without
# torch.
#
# It is that of the torch that workers are installed with; a test compares the two. It leaves out
# those that need a closure (LBFGS) or gradients of another kind (SparseAdam). A job is checked by
# it at submission; the optimizer itself checks the range of a number on the worker.

_ALL: Final = ("maximize", "weight_decay")
_ADAM: Final = ("betas", "differentiable", "eps", *_ALL)

KEYWORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "adadelta": ("differentiable", "eps", "rho", *_ALL),
    "adafactor": ("beta2_decay", "d", "eps", *_ALL),
    "adagrad": ("differentiable", "eps", "initial_accumulator_value", "lr_decay", *_ALL),
    "adam": ("amsgrad", "decoupled_weight_decay", *_ADAM),
    "adamax": _ADAM,
    "adamw": ("amsgrad", *_ADAM),
    "asgd": ("alpha", "differentiable", "lambd", "t0", *_ALL),
    "muon": (
        *("adjust_lr_fn", "eps", "momentum", "nesterov"),
        *("ns_coefficients", "ns_steps", "weight_decay"),
    ),
    "nadam": ("decoupled_weight_decay", "momentum_decay", *_ADAM),
    "radam": ("decoupled_weight_decay", *_ADAM),
    "rmsprop": ("alpha", "centered", "differentiable", "eps", "momentum", *_ALL),
    "rprop": ("differentiable", "etas", "maximize", "step_sizes"),
    "sgd": ("dampening", "differentiable", "momentum", "nesterov", *_ALL),
}
"""The keywords of each optimizer, keyed by lower-case name; all take `lr`, `schedule`,
`clip_norm`."""

_SWITCHES: Final = frozenset((
    *("amsgrad", "centered", "decoupled_weight_decay", "differentiable", "maximize", "nesterov"),
))  # fmt: skip
_SEVERAL: Final = {"betas": 2, "etas": 2, "ns_coefficients": 3, "step_sizes": 2}
"""The length of the list for each optimizer keyword whose value is a list of numbers."""
_OTHERS: Final = frozenset({"adjust_lr_fn"})


def why_no_value(optimizer: str, keyword: str, value: Any) -> str:
    """Return why a value has a wrong type for an optimizer's keyword, or "" if it is right."""
    if keyword in _SWITCHES:
        return "" if isinstance(value, bool | int) else f"{value!r} is not true or false"
    several = _SEVERAL.get(keyword)
    if optimizer == "adafactor" and keyword == "eps":  # its first may be none
        several, value = 2, [0 if item is None else item for item in _items(value)]
    if several is not None:
        items = _items(value)
        is_so = len(items) == several and all(map(_is_number, items))
        return "" if is_so else f"{value!r} is not a list of {several} numbers"
    return "" if keyword in _OTHERS or _is_number(value) else f"{value!r} is not a number"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


# ---- Weight average ----
#
# The section `weight_average` keeps an average of the parameters over the steps of a run, which
# changes nothing of the training.

_DECAY: Final = 0.999


class WeightAverageSpec(Section):
    """Settings of the average of the parameters that is kept in addition to them.

    ema: exponential, average = decay · average + (1 − decay) · parameter, with decay 0.999 unless
    set. swa: the mean of the parameters at all updates. The average is updated after step
    `start_step` and then every `every` steps; the first update copies the parameters. Under
    Federated the global model is averaged, and steps are rounds.
    """

    kind: Literal["ema", "swa"] = "ema"
    decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    start_step: Whole = 0
    every: Count = 1

    @rule
    def _decay_belongs_to_ema(self) -> Iterator[Violation]:
        if self.decay is not None and self.kind != "ema":
            yield Violation("decay", f"belongs to kind ema only; the kind is {self.kind}")

    def is_due(self, step: int) -> bool:
        """Return whether the average is updated after step `step`, which counts from 1."""
        return step >= self.start_step and (step - self.start_step) % self.every == 0

    def weight(self, num_averaged: int) -> float:
        """Return the weight of the parameters in the update after `num_averaged` updates."""
        if num_averaged == 0:
            return 1.0
        if self.kind == "swa":
            return 1.0 / (num_averaged + 1)
        return 1.0 - (_DECAY if self.decay is None else self.decay)


# ---- Turns ----
#
# The section `turns`: several optimizers of one model, which take turns within each step. Every
# turn is a whole synchronous step over its own parameters, with an objective of its own.


class TurnSpec(Section):
    """An optimizer that takes its turn in every step. params: patterns of the names of the
    parameters that it trains, such as "generator.*"; all others are frozen during the turn. step:
    the entry point that computes the loss of this turn."""

    name: Name
    params: Annotated[
        Items[NonEmptyText],
        Field(min_length=1),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ]
    step: EntrypointName
    optimizer: OptimizerSpec

    def holds(self, name: str) -> bool:
        """Return whether the turn trains a parameter of this name."""
        return is_matched(name, self.params)


def check_turn_parameters(turns: Sequence[TurnSpec], params: Sequence[tuple[str, int]]) -> None:
    """Raise InvalidInputError if a turn trains no parameter, or a parameter is trained by no turn
    or by two. params: names and numbers of dimensions of all trained parameters."""
    violations = []
    for place, turn in enumerate(turns):
        if trained := [(name, num_dims) for name, num_dims in params if turn.holds(name)]:
            check_groups(turn.optimizer, trained)
            continue
        text = f"{', '.join(map(repr, turn.params))} fits no trained parameter"
        violations.append(Violation(f"turns[{place}].params", text))
    for name, _ in params:
        holding = [repr(turn.name) for turn in turns if turn.holds(name)]
        if len(holding) != 1:
            text = f"parameter {name!r} is in {' and '.join(holding) or 'no turn'}; each trained "
            violations.append(Violation("turns", f"{text}parameter is in one turn, or frozen"))
            break
    if violations:
        raise InvalidInputError(violations=violations)
