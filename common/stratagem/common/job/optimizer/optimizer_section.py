"""The section `optimizer`: an optimizer of torch by name, or one of the user's by entry point, and
groups of parameters with values of their own.

Checks itself, but for keywords: what a population draws may make them fit.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, model_validator

from stratagem.common.base import limits
from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.job.optimizer.optimizers import KEYWORDS
from stratagem.common.job.optimizer.schedule_section import ScheduleSpec
from stratagem.common.schema.document import Section, one_of, refuse
from stratagem.common.schema.field_types import (
    EntrypointName,
    Items,
    Kwargs,
    Name,
    NonEmptyText,
    Positive,
    Whole,
)
from stratagem.common.schema.frozen import FrozenDict
from stratagem.common.schema.json_text import not_one_of, suggest

MAX_GROUPS: Final = 64
DEFAULT_GROUP: Final = "default"
_RESERVED: Final = (
    *("params", "name", "entrypoint", "lr"),
    *("kwargs", "schedule", "clip_norm", "groups"),
)


def _check_optimizer_name(value: str) -> str:
    if value.lower() not in KEYWORDS and limits.are_checked():
        raise InvalidInputError(not_one_of(value, sorted(KEYWORDS)))
    return value


class GroupSpec(Section):
    """Parameters with a learning rate or keyword arguments of their own. Further keys are those
    arguments, kept in `kwargs`.

    match: patterns of parameter names, any of which must fit, such as "*.bias". max_dims: the
    parameter has at most as many dimensions. Where both are given, both must hold. lr: None is that
    of the optimizer; the schedule multiplies it.
    """

    name: Name
    match: Items[NonEmptyText] | None = None
    max_dims: Whole | None = None
    lr: Positive | None = None
    kwargs: Kwargs = FrozenDict()

    @model_validator(mode="before")
    @classmethod
    def _gather_kwargs(cls, value: object) -> object:
        return _gathered(cls, value)

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        violations = []
        if not self.match and self.max_dims is None:
            violations.append(Violation("match", "missing; a group needs match or max_dims"))
        if self.name == DEFAULT_GROUP:
            text = f"{self.name!r} is the group of all parameters that are in no other"
            violations.append(Violation("name", text))
        refuse(violations)
        return self

    def holds(self, name: str, num_dims: int) -> bool:
        """Return whether a parameter of this name and number of dimensions belongs to the group."""
        is_small = self.max_dims is None or num_dims <= self.max_dims
        return is_small and (not self.match or is_matched(name, self.match))


class OptimizerSpec(Section):
    """An optimizer of torch by name, or one of the user's by entry point. Further keys are its
    keyword arguments, kept in `kwargs`.

    Those of torch's are checked against the optimizer's signature where torch is. groups: each
    parameter belongs to the first group that holds it, else to the optimizer's own values.
    """

    name: Annotated[Name, AfterValidator(_check_optimizer_name)] | None = None
    entrypoint: EntrypointName | None = None
    lr: Positive
    kwargs: Kwargs = FrozenDict()
    schedule: ScheduleSpec | None = None
    clip_norm: Positive | None = None
    groups: Annotated[Items[GroupSpec], Field(max_length=MAX_GROUPS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _gather_kwargs(cls, value: object) -> object:
        return _gathered(cls, value)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        one_of(self, ("name", "entrypoint"))
        return self

    @model_validator(mode="after")
    def _groups_differ(self) -> Self:
        names = [group.name for group in self.groups or ()]
        refuse(
            [
                Violation(f"groups[{i}].name", f"{name!r} is the name of an earlier group")
                for i, name in enumerate(names)
                if name in names[:i]
            ]
        )
        return self

    @property
    def label(self) -> str:
        """The name, or the entry point, for people."""
        return self.name or str(self.entrypoint)

    def group_of(self, name: str, num_dims: int) -> str:
        """Return the name of the group of a parameter."""
        held = (group.name for group in self.groups or () if group.holds(name, num_dims))
        return next(held, DEFAULT_GROUP)

    def of_groups(self) -> Iterator[tuple[str, "OptimizerSpec"]]:
        """Yield each group's name and the values that its parameters are trained with, the default
        group first."""
        for name, own in self.only_of_groups():
            yield name, own.model_copy(update={"kwargs": FrozenDict({**self.kwargs, **own.kwargs})})

    def only_of_groups(self) -> Iterator[tuple[str, "OptimizerSpec"]]:
        """Yield the same with a learning rate, but without the keywords of the optimizer."""
        plain = self.model_copy(update={"groups": None, "kwargs": FrozenDict()})
        yield DEFAULT_GROUP, plain
        for group in self.groups or ():
            lr = self.lr if group.lr is None else group.lr
            yield group.name, plain.model_copy(update={"lr": lr, "kwargs": group.kwargs})


def check_optimizer(spec: OptimizerSpec) -> Iterator[Violation]:
    """Yield the optimizer's name, or a keyword, that torch does not know.

    Nothing is known here of what an entry point takes.
    """
    if spec.name is None:
        return
    known = KEYWORDS.get(spec.name.lower())
    if known is None:
        yield Violation("optimizer.name", not_one_of(spec.name, sorted(KEYWORDS)))
        return
    groups = [(f"optimizer.groups[{i}]", group.kwargs) for i, group in enumerate(spec.groups or ())]
    for path, kwargs in [("optimizer", spec.kwargs), *groups]:
        for key, value in kwargs.items():
            if key not in known:
                allowed = ", ".join(sorted(known))
                text = f"{value!r}, but {spec.name} takes no {key!r}{suggest(key, known)}"
                yield Violation(f"{path}.{key}", f"{text}; it takes {allowed}")


def is_matched(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a parameter's name fits any of these patterns, such as "encoder.*"."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _gathered(cls: type[Section], value: object) -> object:
    """Return the document of a section with its further keys in `kwargs`."""
    if not isinstance(value, Mapping):
        return value
    own = {key: item for key, item in value.items() if key in cls.model_fields}
    further = {key: item for key, item in value.items() if key not in cls.model_fields}
    given: Any = own.get("kwargs", {})
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
    return {**own, "kwargs": {**given, **further}}
