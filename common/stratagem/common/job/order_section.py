"""The section `data.order`: in which order a run passes the training rows."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from pydantic import model_validator

from stratagem.common.base.errors import Violation
from stratagem.common.schema.document import Section, one_of
from stratagem.common.schema.field_types import Count, EntrypointName
from stratagem.common.schema.rules import rule

_OWNERS = {
    "weights": "weighted",
    "num_rows": "weighted",
    "lengths": "bucketed",
    "window": "bucketed",
}


class OrderSpec(Section):
    """The order of the training rows in each epoch: one of ours by name, or an entry point. Bare
    text is either."""

    by: Literal["shuffle", "sequential", "weighted", "bucketed"] | None = None
    entrypoint: EntrypointName | None = None
    weights: EntrypointName | None = None
    num_rows: Count | None = None
    lengths: EntrypointName | None = None
    window: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if isinstance(value, str):
            return {"entrypoint" if ":" in value else "by": value}
        return dict(value) if isinstance(value, Mapping) else value

    @rule
    def _one_source(self) -> Iterable[Violation]:
        return one_of(self, ("by", "entrypoint"))

    @rule
    def _goes_together(self) -> Iterator[Violation]:
        for name, owner in _OWNERS.items():
            if getattr(self, name) is not None and self.by != owner:
                yield Violation(name, f"has a meaning only with by: {owner}")
        for owner, name in (("weighted", "weights"), ("bucketed", "lengths")):
            if self.by == owner and getattr(self, name) is None:
                yield Violation(
                    name, f"missing; by: {owner} needs it, for example {name}: my_module:{name}"
                )
