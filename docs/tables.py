"""Tables of the documentation, read off the code: job keys, strategies, names of parts.

Owns how a field's type, default and allowed values are said in words. Knows no page.
"""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, ForwardRef, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stratagem.common.job import (
    AccumulationSpec,
    CodeSpec,
    CompressionSpec,
    ExecutionSpec,
    InitialSpec,
    JobSpec,
    privacy,
    schedules,
    sections,
)
from stratagem.common.job.fields import LOSSES, METRICS, Every, OrderSpec, StopSpec
from stratagem.common.job.optimizer import (
    GroupSpec,
    OptimizerSpec,
    TurnSpec,
    UpdateRuleSpec,
    WeightAverageSpec,
)
from stratagem.common.job.schedules import HyperparameterSchedule, ScheduleSpec, SettingSpec
from stratagem.common.job.search_space import SearchSpace
from stratagem.common.model.graph import EdgeSpec, GraphSpec, NodeSpec, SubgraphSpec
from stratagem.common.schema.document import DocumentValue, OneKey
from stratagem.common.schema.messages import TECHNICAL
from stratagem.common.strategy import Strategy, choices, strategies
from stratagem.worker.models.build import MODULES
from stratagem.worker.site.file import AcceptRule, AuditSpec, SiteDataSpec, SiteSpec

SECTIONS: Mapping[str, type[BaseModel]] = {
    kind.__name__: kind
    for kind in (
        JobSpec,
        sections.ModelSpec,
        GraphSpec,
        NodeSpec,
        EdgeSpec,
        SubgraphSpec,
        sections.DataSpec,
        OrderSpec,
        CodeSpec,
        InitialSpec,
        sections.LossSpec,
        TurnSpec,
        OptimizerSpec,
        GroupSpec,
        UpdateRuleSpec,
        WeightAverageSpec,
        ScheduleSpec,
        sections.EvaluationSpec,
        StopSpec,
        sections.CheckpointSpec,
        sections.RecordingSpec,
        sections.VerificationSpec,
        AccumulationSpec,
        ExecutionSpec,
        CompressionSpec,
        schedules.PhasesSpec,
        schedules.PredictorSpec,
        schedules.AdaptationSpec,
        privacy.PrivacySpec,
        privacy.ClipSpec,
        privacy.AdaptiveClipSpec,
        privacy.PrivacyTargetSpec,
        sections.PartitionSpec,
        HyperparameterSchedule,
        SettingSpec,
        SiteSpec,
        SiteDataSpec,
        AcceptRule,
        AuditSpec,
    )
}
STRATEGY_OBJECTS: Mapping[str, tuple[type[DocumentValue], ...]] = {
    kind.__name__: (kind, *parts)
    for kind, *parts in (
        (strategies.Local,),
        (strategies.DataParallel, *get_args(choices.GradientAggregation)),
        (strategies.ModelParallel, choices.Partition, *get_args(choices.CommunicationProtocol)),
        (
            strategies.Federated,
            *get_args(choices.FederatedAggregation),
            *get_args(choices.ClientSelection),
            *get_args(choices.ServerOptimizer),
        ),
        (
            strategies.PopulationBased,
            *get_args(choices.ExploitStrategy),
            *get_args(choices.ExploreStrategy),
        ),
        (strategies.Custom,),
    )
}
CHECKED_BY = {
    "_read_regions": ("mapping", "lists of clients by region, each client in one"),
    "_check_name": ("name", ""),
    "_check_entrypoint": ("entry point", ""),
    "check_digest": ("64 hex digits", ""),
    "check_tensor_file": ("path", "`*.safetensors`"),
    "check_run_id": ("string", "1 to 64 of a–z, 0–9, `-`"),
    "_check_which": ("string", "`final`, `best`, the number of a segment"),
    "_check_signature": ("128 hex digits of `stratagem code sign`", ""),
    "check_requirement": ("string", "a distribution and its versions, `name>=1`"),
    "_check_node_id": ("node id", ""),
    "_check_module": ("string", "a module named [below](#modules-of-a-graph)"),
    "_check_topology": ("string", choices.KNOWN_TOPOLOGIES),
    "_check_code": ("string or list", "`none`, `signed:FILE`, a list of `sha256:DIGEST`"),
    "_check_window": ("string", "days and hours, `Mon-Fri 19:00-06:00`"),
    "_check_zone": ("string", "a name of the time-zone database, `Europe/Vienna`"),
    "_read_data": ("table", "at least one [`data.NAME`](#sitedataspec)"),
    "_check_quorum": ("number", "a count ≥ 1 or a share in (0, 1]"),
    "_read_late_updates": ("string or mapping", "`refuse`, or `{discount: d}` with d in (0, 1]"),
}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
PLAIN_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


# ---- the job ----


def job_section(name: str) -> str:
    """The keys of one section of the job file."""
    fields = SECTIONS[name].model_fields.items()
    rows = ((f"`{key}`", _value(*_said(info)), default_text(info)) for key, info in fields)
    return table(("key", "value", "default"), rows)


def _value(kind: str, allowed: str) -> str:
    """A type and what is allowed of it, as one cell."""
    if kind.startswith("list of") and allowed == "at least one":
        return f"{kind}, {allowed}"
    if kind == "list of" or not (kind and allowed):
        return f"{kind} {allowed}".strip()
    return f"{kind} {allowed}" if allowed[0] in "≥>≤<" else f"{kind}: {allowed}"


def _said(info: FieldInfo) -> tuple[str, str]:
    """(type, allowed) of a field."""
    return _words(info.annotation, info.metadata)


def _words(annotation: Any, metadata: Any = ()) -> tuple[str, str]:
    if isinstance(annotation, ForwardRef):
        annotation = SECTIONS[annotation.__forward_arg__]
    if hasattr(annotation, "__metadata__"):  # Annotated
        inner = [part for part in annotation.__metadata__ if not isinstance(part, FieldInfo)]
        infos = [part for part in annotation.__metadata__ if isinstance(part, FieldInfo)]
        bounds = [bound for info in infos for bound in info.metadata]
        return _words(get_args(annotation)[0], [*inner, *bounds])
    for part in metadata:
        checker = getattr(getattr(part, "func", None), "__name__", "")
        if checker in CHECKED_BY:
            return CHECKED_BY[checker]
        if isinstance(part, OneKey):
            forms = ", ".join(f"`{form}`" for form in part.forms())
            return "string or mapping" if part.words else "mapping", forms
    if set(get_args(annotation)) == set(get_args(Strategy)):
        return "[strategy](#strategy)", ""
    if get_origin(annotation) in (Union, types.UnionType):
        kinds_of_it = [part for part in get_args(annotation) if part is not type(None)]
        if all(isinstance(kind, type) and issubclass(kind, DocumentValue) for kind in kinds_of_it):
            return _choices(kinds_of_it)
        return _words(kinds_of_it[0])
    return _plain(annotation, metadata)


def _plain(annotation: Any, metadata: Any) -> tuple[str, str]:
    if get_origin(annotation) is Literal:
        values = get_args(annotation)
        return "", ", ".join(map(value_text, values))
    if annotation is SearchSpace:
        return "[search space](#search-space)", ""
    if annotation is Every:
        return "interval", "`1 epoch`, `100 steps`, `2 rounds`"
    if get_origin(annotation) is tuple:
        kind, allowed = _words(get_args(annotation)[0])
        is_empty_allowed = not any(getattr(part, "min_length", 0) for part in metadata)
        least = "" if is_empty_allowed else "at least one"
        plural = "s" if kind in (*PLAIN_TYPES.values(), "name", "node id", "mapping") else ""
        allowed = "" if allowed == "not empty" else allowed
        return f"list of {kind}{plural}".strip(), allowed or least
    if get_origin(annotation) is Mapping:
        return "keyword arguments", ""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})", ""
    if isinstance(annotation, type) and issubclass(annotation, DocumentValue):
        return "mapping", ""
    if annotation is Any:
        return "any JSON", ""
    return PLAIN_TYPES[annotation], " and ".join(_bounds(metadata))


def _bounds(metadata: Any) -> Iterator[str]:
    for part in metadata:
        for key, sign in SIGNS.items():
            bound = getattr(part, key, None)
            if bound is not None and bound < TECHNICAL:
                yield f"{sign} {bound}"
        if getattr(part, "min_length", 0):
            yield "not empty"


def default_text(info: FieldInfo) -> str:
    if info.is_required():
        return "**required**"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or value in (None, (), [], {}, ""):
        return ""
    return value_text(value)


def value_text(value: object) -> str:
    if isinstance(value, DocumentValue):
        return f"`{{type: {type(value).__name__}}}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    return f"`{value}`"


# ---- strategies ----


def strategy_section(name: str) -> str:
    """The keys of a strategy object and of the choices inside it."""
    rows = [
        (_of(key, kind.__name__, name), *cells)
        for kind in STRATEGY_OBJECTS[name]
        for key, *cells in _object_rows(kind)
    ]
    return table(("key", "value", "default"), rows) if rows else "It has no keys."


def _of(key: str, owner: str, strategy: str) -> str:
    return f"`{key}`" if owner == strategy else f"`{key}` of `{owner}`"


def _object_rows(kind: type[DocumentValue], prefix: str = "") -> Iterator[tuple[str, ...]]:
    own = {name: info for name, info in kind.__pydantic_fields__.items() if not info.kw_only}
    options = own.pop("options", None)
    for name, info in own.items():
        sort, allowed = _said(info)
        if sort == "[strategy](#strategy)":
            sort = "[strategy](strategies/nesting.md)"
        key = name.removesuffix("_")  # of a key that is a word of Python's
        yield (f"{prefix}{key}", _value(sort, allowed), default_text(info))
        if (section := _untagged(info.annotation)) is not None:
            yield from _object_rows(section, f"{prefix}{name}.")
    if options is not None:
        yield from _object_rows(options.annotation, "options.")  # type: ignore[arg-type]


def _tags(kind: type[DocumentValue]) -> list[str]:
    return [name for name, info in kind.__pydantic_fields__.items() if info.kw_only]


def _untagged(annotation: Any) -> type[DocumentValue] | None:
    """The one kind of mapping that a field holds, if it holds one that has no tag."""
    kinds = [part for part in get_args(annotation) or [annotation] if part is not type(None)]
    if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], DocumentValue):
        return None if _tags(kinds[0]) else kinds[0]
    return None


def _choices(kinds_of_it: list[type[DocumentValue]]) -> tuple[str, str]:
    if not _tags(kinds_of_it[0]):
        return "mapping", ""
    (tag,) = _tags(kinds_of_it[0])
    names = [kind.__pydantic_fields__[tag].default for kind in kinds_of_it]
    return f"`{tag}`", ", ".join(f"`{name}`" for name in names)


# ---- names ----


def losses() -> str:
    rows = ((f"`{name}`", _listed(known)) for name, known in LOSSES.items())
    return table(("loss", "keys of `kwargs`"), rows)


def metrics() -> str:
    return _listed(METRICS)


def modules() -> str:
    return _listed(MODULES)


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"


RENDERED: Mapping[str, Callable[[], str]] = {
    "losses": losses,
    "metrics": metrics,
    "modules": modules,
    **{f"job {name}": lambda name=name: job_section(name) for name in SECTIONS},  # type: ignore[misc]
    **{
        f"strategy {name}": lambda name=name: strategy_section(name)  # type: ignore[misc]
        for name in STRATEGY_OBJECTS
    },
}
"""The makers of the parts by the names of their markers."""
