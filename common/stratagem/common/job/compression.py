"""The section `compression`: the coding of what goes over the wire, with all codecs' options.

The codecs themselves are in `stratagem.common.compression`.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from stratagem.common.base.errors import Violation
from stratagem.common.schema.document import Count, Section, Whole
from stratagem.common.schema.rules import rule
from stratagem.common.strategy import (
    DataParallel,
    Strategy,
)

_OWNERS: Final[Mapping[str, tuple[str, ...]]] = {
    "stochastic": ("int8", "ternary"),
    "block": ("int8", "int4"),
    "threshold_fraction": ("ternary",),
    "k_fraction": ("top_k",),
    "rank": ("low_rank",),
    "dimension_fraction": ("vsa",),
    "sketch_codec": ("vsa",),
}
"""The options that only some codecs have, each with the names of those codecs."""
BLOCK: Final = 128
"""The number of elements that share a scale in a codec with blocks, if the job does not say."""
_BIASED: Final = frozenset({"ternary", "top_k", "low_rank", "vsa"})


class CompressionSpec(Section):
    """A codec and its options. Bare text is the codec's name.

    error_feedback: add what a payload did not carry to the next one; by default only for biased
    codecs. block: the number of elements that share a scale; by default the whole tensor for int8,
    128 for int4. threshold_fraction: the threshold as a fraction of mean |x|. k_fraction: the
    fraction of the elements that is kept. dimension_fraction: the places of the sketch per element.
    consensus_step_size: under Decentralized, how far a node moves toward its neighbours' public
    copies; the default depends on the codec. seed: the seed of random choices; by default that of
    the job.
    """

    codec: Literal["none", "fp16", "bf16", "int8", "int4", "ternary", "top_k", "low_rank", "vsa"]
    error_feedback: bool | None = None
    stochastic: bool = False
    block: Count | None = None
    threshold_fraction: Annotated[float, Field(ge=0)] = 0.7
    k_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
    rank: Count = 4
    dimension_fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    sketch_codec: Literal["none", "int8", "ternary"] = "none"
    consensus_step_size: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Whole | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return {"codec": value} if isinstance(value, str) else value

    @rule
    def _options_fit_the_codec(self) -> Iterator[Violation]:
        for name, owners in _OWNERS.items():
            default = CompressionSpec.model_fields[name].default
            if self.codec not in owners and getattr(self, name) != default:
                text = f"belongs to codec {' or '.join(owners)} only; the codec is {self.codec}"
                yield Violation(name, text)
        if self.error_feedback and self.codec == "none":
            yield Violation("error_feedback", "has no meaning with codec none")

    @rule
    def _options_go_together(self) -> Iterator[Violation]:
        if self.error_feedback and self.stochastic:
            text = "does not go together with stochastic, which is unbiased: the residual would "
            yield Violation("error_feedback", f"{text}grow")
        if self.stochastic and self.block is not None:
            text = "does not go together with block, whose levels are rounded to the nearest"
            yield Violation("stochastic", text)

    @property
    def has_feedback(self) -> bool:
        if self.error_feedback is None:
            return self.codec in _BIASED and not self.stochastic
        return self.error_feedback

    @property
    def consensus_step(self) -> float:
        """Return the consensus step size; by default, it is smaller the less a payload carries."""
        if self.consensus_step_size is not None:
            return self.consensus_step_size
        match self.codec:
            case "top_k":
                return self.k_fraction
            case "vsa":
                return self.dimension_fraction / 2
            case "low_rank":
                return 0.1
            case _:
                return 1.0

    @property
    def keeps_state(self) -> bool:
        """Return whether a shard's codec keeps state from one payload to the next."""
        return self.has_feedback or self.codec == "low_rank"


def exchanged_codec(
    compression: CompressionSpec | None, strategy: Strategy
) -> CompressionSpec | None:
    """Return the section with the codec of the gradients that replicas exchange, wherever it is
    set; None if they are sent uncoded."""
    if isinstance(strategy, DataParallel) and strategy.options.outer_bits is not None:
        bits = strategy.options.outer_bits
        return CompressionSpec(codec="int8" if bits == 8 else "int4", block=BLOCK)
    return None if compression is None or compression.codec == "none" else compression
