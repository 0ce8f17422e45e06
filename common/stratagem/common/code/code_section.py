"""The code that travels with a job, and the distributions that it needs on workers.

A person gives a folder; the client packs it as a bundle, and the job that is sent names the bundle
by its digest.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Final, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.base.ids import Digest, check_digest
from stratagem.common.schema.document import NonEmptyItems, NonEmptyText, Section, one_of, only_with
from stratagem.common.schema.rules import rule

_MAX_CHARS: Final = 256
_SIGNATURE: Final = re.compile("[0-9a-f]{128}")


def _check_signature(value: str) -> str:
    if not _SIGNATURE.fullmatch(value):
        raise InvalidInputError("is not the 128 hex digits that `stratagem code sign` prints")
    return value


class CodeSpec(Section):
    """A folder of the client, or the digest of a bundle. Bare text is a folder.

    include: take only files that match one of these patterns, which have the form of .gitignore;
    exclude: leave out files that match one of these. signature: the signature of the bundle, made
    by `stratagem code sign`.
    """

    path: Annotated[NonEmptyText, Field(examples=["src"])] | None = None
    include: NonEmptyItems[NonEmptyText] | None = None
    exclude: NonEmptyItems[NonEmptyText] | None = None
    digest: Annotated[Digest, AfterValidator(check_digest)] | None = None
    signature: Annotated[str, AfterValidator(_check_signature)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value

    @rule
    def _one_source(self) -> Iterator[Violation]:
        yield from one_of(self, ("path", "digest"))
        for name in ("include", "exclude"):
            yield from only_with(self, name, "path")


def check_requirement(value: str) -> str:
    """Validate a requirement such as "transformers>=5", return it. Raises InvalidInputError."""
    if len(value) > _MAX_CHARS:
        raise InvalidInputError(f"is longer than {_MAX_CHARS} characters")
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(value)
    except InvalidRequirement as error:
        reason = str(error).partition("\n")[0]
        raise InvalidInputError(f"{value!r} is no requirement such as name>=1: {reason}") from None
    if requirement.url is not None:
        raise InvalidInputError(f"{value!r}: nothing is installed; name versions and no address")
    return value


RequirementText: TypeAlias = Annotated[str, AfterValidator(check_requirement)]
