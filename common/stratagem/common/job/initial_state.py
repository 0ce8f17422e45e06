"""Names the stored state from which a run's weights come, unless they are drawn from the seed.

A run begins from a stored state, which a digest names. What a person would rather name, an earlier
run or a file, is turned into that digest by the client before the job is submitted: what a run
began from then stands in its job, whatever happens to the run or the file later.
"""

import re
from typing import Annotated, Self

from pydantic import AfterValidator, model_validator

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.base.ids import Digest, check_run_id
from stratagem.common.job.sections import check_digest, check_tensor_file
from stratagem.common.schema.document import Section, one_of, refuse
from stratagem.common.schema.field_types import Kwargs


def _check_which(value: str) -> str:
    if value not in ("final", "best") and not re.fullmatch("[0-9]{1,18}", value):
        raise InvalidInputError(f"{value!r} is not final, best or the number of a segment")
    return value


class InitialSpec(Section):
    """A stored state by its digest; or a run, or a safetensors file of the client.

    which: of a run, as in `stratagem download`: final, best or the number of a segment.
    trained_with: of a digest, the hyperparameters of the population's member whose state it is, for
    the error where it does not fit; the client finds them with the digest.
    """

    digest: Annotated[Digest, AfterValidator(check_digest)] | None = None
    run: Annotated[str, AfterValidator(check_run_id)] | None = None
    which: Annotated[str, AfterValidator(_check_which)] | None = None
    file: Annotated[str, AfterValidator(check_tensor_file)] | None = None
    trained_with: Kwargs | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        one_of(self, ("digest", "run", "file"))
        if self.which is not None and self.run is None:
            refuse([Violation("which", "has a meaning only together with run")])
        if self.trained_with is not None and self.digest is None:
            refuse([Violation("trained_with", "has a meaning only together with digest")])
        return self
