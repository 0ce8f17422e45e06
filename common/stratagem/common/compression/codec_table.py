"""The codec that a job's `compression` names, for a layout. The only place that knows them all."""

from collections.abc import Callable

from stratagem.common.compression.blocks import ScaledBlocks
from stratagem.common.compression.casts import BrainFloat, Half
from stratagem.common.compression.codec import Codec, Layout, PerTensor, Plain, TensorCodec
from stratagem.common.compression.error_feedback import ErrorFeedback
from stratagem.common.compression.int8 import Int8
from stratagem.common.compression.low_rank import LowRank
from stratagem.common.compression.ternary import Ternary
from stratagem.common.compression.top_k import TopK
from stratagem.common.compression.vsa import Vsa, VsaBesidePlain, places_beside
from stratagem.common.job.compression_section import BLOCK, CompressionSpec
from stratagem.common.numerics.numerics_rules import CURRENT


def make_codec(
    spec: CompressionSpec,
    layout: Layout,
    seed: int,
    *,
    with_feedback: bool = True,
    numerics: int = CURRENT,
) -> Codec:
    """seed: of the job; `spec.seed` goes before it. with_feedback: whether there is a party that
    keeps residuals, where the section wants them."""
    codec = _bare_codec(spec, layout, seed if spec.seed is None else spec.seed, numerics)
    return ErrorFeedback(layout, codec) if spec.has_feedback and with_feedback else codec


def _bare_codec(spec: CompressionSpec, layout: Layout, seed: int, numerics: int) -> Codec:
    match spec.codec:
        case "low_rank":
            return LowRank(layout, rank=spec.rank, seed=seed)
        case "vsa":
            fraction, inner = spec.dimension_fraction, spec.sketch_codec
            beside = places_beside(layout, fraction, numerics)
            others = [tensor for place, tensor in enumerate(layout) if place not in beside]
            bundled = Vsa(others, dimension_fraction=fraction, sketch_codec=inner)
            return VsaBesidePlain(layout, beside, bundled) if beside else bundled
        case _:
            make = _tensor_codec(spec)
            return PerTensor(layout, [make(tensor.numel) for tensor in layout])


def _tensor_codec(spec: CompressionSpec) -> Callable[[int], TensorCodec]:
    """Makes the codec of a tensor of so many elements."""
    match spec.codec:
        case "fp16":
            return Half
        case "bf16":
            return BrainFloat
        case "int8" | "int4" if spec.block is not None or spec.codec == "int4":
            bits, block = int(spec.codec.removeprefix("int")), spec.block or BLOCK
            return lambda numel: ScaledBlocks(numel, bits=bits, block=block)
        case "int8":
            return lambda numel: Int8(numel, stochastic=spec.stochastic)
        case "ternary":
            return lambda numel: Ternary(
                numel, threshold_fraction=spec.threshold_fraction, stochastic=spec.stochastic
            )
        case "top_k":
            return lambda numel: TopK(numel, k_fraction=spec.k_fraction)
        case "none":
            return Plain
        case _:
            raise AssertionError(f"codec {spec.codec!r} has no implementation here")
