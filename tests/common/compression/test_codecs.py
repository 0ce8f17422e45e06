"""Every codec: its bytes, its error, what it keeps, and what it refuses."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.compression import Codec, FloatArray, NonFiniteError, TensorLayout, make_codec
from stratagem.common.compression.codec import in_memory
from stratagem.common.compression.quantize import Ternary, pack, quantise, unpack
from stratagem.common.compression.table import are_forwarded, sum_messages, unit
from stratagem.common.compression.top_k import largest
from stratagem.common.compression.vsa import Sketch, bind, bundle, key_of, places_beside
from stratagem.common.job import CompressionSpec
from stratagem.common.numerics.keys import derive, hash32, lowbias32, places, uniform
from stratagem.common.numerics.rules import CURRENT, FIRST
from stratagem.common.numerics.shards import pairwise_sum
from tests.common.compression.support import CODECS, ODD, codec_of, flat, values

pytestmark = pytest.mark.core

LAYOUTS = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4).map(
    lambda shapes: tuple(TensorLayout(f"t{i}", shape) for i, shape in enumerate(shapes))
)
BOUNDS = {"none": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Relative to each value."""


BF16 = {
    0x3F80_7FFF: 0x3F80,
    0x3F80_8000: 0x3F80,  # halfway: to the even one
    0x3F80_8001: 0x3F81,
    0x3F81_7FFF: 0x3F81,
    0x3F81_8000: 0x3F82,
    0xBF81_8000: 0xBF82,
    0x0001_8000: 0x0002,
    0x7F7F_FFFF: 0x7F7F,  # the largest stays finite
}


def test_bfloat16_is_the_nearest_and_of_two_the_even_one() -> None:
    numbers = np.array([*BF16], np.uint32).view(np.float32)
    codec = codec_of(CODECS["bf16"], (TensorLayout("t", numbers.shape),))
    payload, _ = codec.encode([numbers], codec.initial_state(), 0)
    assert payload.view(np.uint16).tolist() == [*BF16.values()]


@pytest.mark.parametrize(("numerics", "divisor"), [(FIRST, 1.0), (2, 3.0), (CURRENT, 3.0)])
def test_the_first_rules_code_the_sum_of_a_shard_and_the_others_its_mean(
    numerics: int, divisor: float
) -> None:
    assert unit(3.0, numerics) == divisor
    assert unit(0.0, numerics) == unit(math.inf, numerics) == 1.0


@pytest.mark.parametrize("name", CODECS)
def test_parts_make_up_the_whole(name: str) -> None:
    whole = codec_of(CODECS[name])
    for cut in (0, 1, 3, 5):
        parts = [whole.part(range(cut)), whole.part(range(cut, len(ODD)))]
        if CODECS[name]["codec"] == "vsa":
            assert parts == [None, None]
        else:
            check_parts(whole, parts, cut)


def check_parts(whole: Codec, parts: list[Codec | None], cut: int) -> None:
    state = whole.initial_state()
    for key in (5, 6):  # residuals and bases follow
        tensors = values(ODD, key)
        payload, after = whole.encode(tensors, state, key)
        decoded, pieces = [], []
        kept: dict[str, Any] = {}
        for part, own in zip(parts, (tensors[:cut], tensors[cut:]), strict=True):
            assert part is not None
            before = {each: state[each] for each in part.initial_state()}
            piece, remains = part.encode(own, before, key)
            assert piece.nbytes == part.payload_bytes
            decoded += part.decode(piece, key)
            pieces.append(piece)
            kept.update(remains)
        assert np.array_equal(np.concatenate(pieces), payload)
        assert np.array_equal(flat(decoded), flat(whole.decode(payload, key)))
        assert kept.keys() == after.keys()
        assert all(np.array_equal(kept[each], after[each]) for each in kept)
        state = after


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=8)
@given(layout=LAYOUTS, seed=st.integers(0, 2**20), scale=st.sampled_from([1e-30, 1.0, 1e30]))
def test_any_layout_comes_back_in_the_bytes_that_were_announced(
    name: str, layout: tuple[TensorLayout, ...], seed: int, scale: float
) -> None:
    codec, tensors = codec_of(CODECS[name], layout), values(layout, seed, scale)
    before = [tensor.copy() for tensor in tensors]
    payload, state = codec.encode(tensors, codec.initial_state(), seed)
    decoded = codec.decode(payload, seed)
    assert payload.dtype == np.uint8
    assert payload.nbytes == codec.payload_bytes <= sum(spec.raw_bytes for spec in layout)
    assert [d.shape for d in decoded] == [(spec.numel,) for spec in layout]
    assert all(d.dtype == np.float32 and np.isfinite(d).all() for d in decoded)
    assert all(np.array_equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert {k: v.shape for k, v in state.items()} == {
        k: v.shape for k, v in codec.initial_state().items()
    }
    again, _ = codec.encode(tensors, codec.initial_state(), seed)
    assert again.tobytes() == payload.tobytes()
    for spec, x, y in zip(layout, tensors, decoded, strict=True):
        if name in BOUNDS or spec.name in codec.bypassed:
            bound = 0.0 if spec.name in codec.bypassed else BOUNDS[name]
            tiny = np.float32(2.0**-25) * np.max(np.abs(x), initial=0)  # of fp16 in its scale
            assert (np.abs(x - y) <= np.maximum(bound * np.abs(x), tiny if bound else 0)).all()
        if name == "int8" and spec.numel:
            assert np.max(np.abs(x - y)) <= np.max(np.abs(x)) / 127 * 0.5001 + 1e-37
        if name == "int4" and spec.numel:
            assert np.max(np.abs(x - y)) <= np.max(np.abs(x)) / 7 * 0.5001 + 1e-37


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_zeros_and_what_is_not_finite_or_too_long_is_refused(name: str) -> None:
    codec = codec_of(CODECS[name])
    zeros = [np.zeros_like(tensor) for tensor in values(ODD, 0)]
    payload, state = codec.encode(zeros, codec.initial_state(), 1)
    assert not flat(codec.decode(payload, 1)).any()
    # And afterwards it codes as before: nothing has died.
    tensors = values(ODD, 1)
    payload, _ = codec.encode(tensors, state, 2)
    assert flat(codec.decode(payload, 2)).any()
    for value in (math.nan, math.inf):
        tensors[3][6] = value
        with pytest.raises(NonFiniteError, match="bias has values"):
            codec.encode(tensors, codec.initial_state(), 0)
    with pytest.raises(ValueError, match="bytes came, expected"):
        codec.decode(np.zeros(codec.payload_bytes + 1, np.uint8), 0)


WITH_FEEDBACK = [name for name in CODECS if codec_of(CODECS[name]).initial_state()]


def test_the_biased_codecs_have_feedback() -> None:
    assert list(WITH_FEEDBACK) == [
        *("int8-feedback", "int4-feedback", "ternary", "top_k", "top_k-bitmap", "low_rank"),
        *("vsa", "vsa-int8", "vsa-ternary"),
    ]


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_what_was_decoded_and_the_residual_are_what_was_given(name: str) -> None:
    codec = codec_of(CODECS[name])
    state = codec.initial_state()
    given_sum = [np.zeros(spec.numel) for spec in ODD]
    decoded_sum = [np.zeros(spec.numel) for spec in ODD]
    for step in range(10):
        tensors = values(ODD, step)
        before = [residual(state, spec) for spec in ODD]
        payload, state = codec.encode(tensors, state, step)
        decoded = codec.decode(payload, step)
        for i, spec in enumerate(ODD):
            # The formula, to the bit.
            expected = (tensors[i] + before[i]) - decoded[i]
            assert np.array_equal(residual(state, spec), expected), spec.name
            given_sum[i] += tensors[i]
            decoded_sum[i] += decoded[i]
    for i, spec in enumerate(ODD):
        left = given_sum[i] - decoded_sum[i]
        assert np.allclose(left, residual(state, spec), atol=1e-4), spec.name


def residual(state: Any, spec: TensorLayout) -> FloatArray:
    found: FloatArray = state.get(f"residual/{spec.name}", np.zeros(spec.numel, np.float32))
    return found


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_a_residual_does_not_grow_without_end(name: str) -> None:
    codec = codec_of(CODECS[name])
    state, constant = codec.initial_state(), values(ODD, 5)
    norms = []
    for step in range(40):
        _, state = codec.encode(constant, state, derive(7, step))
        norms.append(max(float(np.linalg.norm(residual(state, spec))) for spec in ODD))
    assert max(norms[20:]) < 1.5 * max(norms[:20]), norms[-1]


@pytest.mark.parametrize("name", ["int8-stochastic", "ternary-stochastic"])
def test_stochastic_codecs_are_unbiased(name: str) -> None:
    codec = codec_of(CODECS[name])
    tensors, num_draws = values(ODD, 2), 200
    draws = np.stack(
        [
            flat(codec.decode(codec.encode(tensors, {}, derive(1, k))[0], derive(1, k)))
            for k in range(num_draws)
        ]
    )
    # A draw lies in a range as wide as its scale, so a deviation is at most half of that.
    scale = 2 if name.startswith("ternary") else 2 / 127  # ± max|x|, ± one level
    largest_of = [np.full(x.size, np.max(np.abs(x), initial=0)) for x in tensors]
    allowed = 5 * scale / 2 * np.concatenate(largest_of) / math.sqrt(num_draws)
    assert (np.abs(draws.mean(axis=0, dtype=np.float64) - flat(tensors)) <= allowed).all()


# ---- the parts ----


def test_the_hash_is_the_published_one() -> None:
    # By hand, in Python integers.
    def plain(x: int) -> int:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
        return x ^ (x >> 16)

    numbers = np.array([0, 1, 2, 12345, 2**32 - 1], np.uint32)
    assert lowbias32(numbers).tolist() == [plain(int(n)) for n in numbers]
    assert hash32(99, numbers).tolist() == [plain(plain(int(n)) ^ 99) for n in numbers]
    draws = uniform(7, places(100_000))
    assert draws.dtype == np.float32
    assert 0 <= draws.min() < draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.005
    assert derive(3, 1, 2) != derive(3, 2, 1)
    assert derive(2**40, 0) != derive(0, 0)


def test_trits_take_two_bits_and_the_code_that_nothing_packs_is_refused() -> None:
    for numel in (0, 1, 3, 4, 7, 1000):
        trits = np.random.default_rng(numel).integers(-1, 2, numel).astype(np.int8)
        packed = pack(trits)
        assert packed.nbytes == math.ceil(numel / 4)
        assert np.array_equal(unpack(packed, numel), trits)
    assert pack(np.array([1, -1, 0, 1], np.int8)).tolist() == [0b01_00_10_01]
    with pytest.raises(ValueError, match="code 11"):
        unpack(np.array([0b1100], np.uint8), 4)
    with pytest.raises(ValueError, match="code 11"):
        unpack(np.array([0, 0b1100], np.uint8), 6)
    beyond = np.array([0b01, 0b1100_0110], np.uint8)  # after the last element in its byte
    assert unpack(beyond, 6).tolist() == [1, 0, 0, 0, -1, 1]


@pytest.mark.parametrize("numel", [1, 4, 1003])
def test_what_is_looked_up_by_byte_is_each_trit_times_the_scale(numel: int) -> None:
    trits = np.random.default_rng(numel).integers(-1, 2, numel).astype(np.int8)
    codec = Ternary(numel, threshold_fraction=0.7, stochastic=False)
    for scale in (0.0, -0.0, 1.5, -3e-39, 3.4e38, np.inf, np.nan):
        head = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
        with np.errstate(all="ignore"):
            decoded = codec.decoder(in_memory(np.concatenate([head, pack(trits)])))(0, numel)
            expected = trits.astype(np.float32) * np.float32(scale)
        assert decoded.view(np.uint32).tolist() == expected.view(np.uint32).tolist()


@given(st.lists(st.floats(-10, 10, width=32), max_size=30), st.sampled_from([0.0, 0.7, 1.5]))
def test_the_ternary_scale_is_the_best_one(numbers: list[float], threshold: float) -> None:
    x = np.array(numbers, np.float32)
    trits, scale = quantise(x, threshold)
    mean = np.abs(x).astype(np.float64).mean() if x.size else 0.0
    assert ((np.abs(x) > np.float32(threshold) * np.float32(mean)) == (trits != 0)).all()
    error = np.square(x - trits * scale).sum(dtype=np.float64)
    for other in (0.9, 1.1):
        assert error <= np.square(x - trits * scale * other).sum(dtype=np.float64) + 1e-6


@pytest.mark.parametrize(("numbers", "total"), [([], 0), ([-0.0], 0), ([1e16, 1, 1], 1e16 + 1)])
def test_sums_go_over_the_tree_of_neighbours(numbers: list[float], total: float) -> None:
    values = np.array(numbers)
    assert (pairwise_sum(values), math.copysign(1, pairwise_sum(values))) == (total, 1)
    # 1e16 + 1 is 1e16; so the order shows: (1e16 + 1) + (1 + 1) is not the sum from the left.
    assert pairwise_sum(np.array([1e16, 1, 1, 1])) == 1e16 + 2


@pytest.mark.parametrize("numerics", [FIRST, CURRENT])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 7])
def test_messages_are_summed_over_the_tree_of_neighbours(num_shards: int, numerics: int) -> None:
    codec = codec_of(CODECS["ternary-stochastic"])
    messages, sums = [], []
    for shard in range(num_shards):
        extras = np.array([10.0**shard, 1.0 if shard else 1e16])
        key = derive(4, 9, shard)
        payload, _ = codec.encode(values(ODD, shard), codec.initial_state(), key)
        messages.append(payload.tobytes() + extras.astype("<f8").tobytes())
        decoded = flat(codec.decode(payload, key)) * np.float32(unit(extras[0], numerics))
        sums.append((decoded, extras))
    while len(sums) > 1:
        pairs = zip(sums[0::2], sums[1::2], strict=False)
        rest = sums[len(sums) // 2 * 2 :]
        sums = [(a + b, more + others) for (a, more), (b, others) in pairs] + rest
    summed, extras = sum_messages(codec, messages, 4, 9, numerics)
    assert summed.tobytes() == sums[0][0].tobytes()
    assert extras.tobytes() == sums[0][1].tobytes()


def test_gradients_of_other_size_do_not_share_a_scale() -> None:
    """[1, 0] and then [0, 0.01] add up to themselves, not to their mean scale."""
    codec = codec_of({"codec": "ternary", "error_feedback": False}, (TensorLayout("w", (8,)),))
    large, small = np.zeros((2, 8), np.float32)
    large[0], small[1] = 1.0, 0.01
    total = sum(codec.decode(codec.encode([x], {}, 0)[0], 0)[0] for x in (large, small))
    assert np.array_equal(total, large + small)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.integers(0, 30))
def test_the_largest_are_kept_and_of_equals_the_first(numbers: list[int], k: int) -> None:
    k = min(k, len(numbers))
    expected = sorted(sorted(range(len(numbers)), key=lambda i: (-abs(numbers[i]), i))[:k])
    assert largest(np.array(numbers, np.float32), k).tolist() == expected


def test_a_matrix_of_low_rank_comes_back_whole() -> None:
    generator = np.random.default_rng(0)
    matrix = generator.standard_normal((40, 2)) @ generator.standard_normal((2, 30))
    codec = codec_of({"codec": "low_rank", "rank": 3}, (TensorLayout("m", (40, 30)),))
    x = matrix.astype(np.float32).reshape(-1)
    payload, _ = codec.encode([x], codec.initial_state(), 0)
    assert payload.nbytes == 4 * 3 * (40 + 30)
    assert np.allclose(codec.decode(payload, 0)[0], x, atol=1e-5)


@pytest.mark.parametrize("numel", [1, 7, 64, 65, 1000])
def test_a_sketch_and_its_transpose_belong_together(numel: int) -> None:
    sketch, generator = Sketch(11, numel, 64), np.random.default_rng(numel)
    x = generator.integers(-8, 8, numel).astype(np.float32)
    y = generator.integers(-8, 8, 64).astype(np.float32)
    assert float(sketch.project(x) @ y) == float(x @ sketch.transpose(y))
    # As written down: one element after the other.
    total = [0.0] * 64
    for block in range(-(-numel // 64)):
        a, c = (int(v) for v in hash32(11, np.array([2 * block, 2 * block + 1], np.uint32)))
        for j in range(64):
            i = block * 64 + (((a | 1) * j + c) % 64)
            word = np.array([block * 64 + j], np.uint32)
            sign = 1 if hash32(11 ^ 0x9E3779B9, word)[0] % 2 == 0 else -1
            total[j] += sign * x[i] if i < numel else 0.0
    assert sketch.project(x).tolist() == total


def test_a_key_undoes_itself_and_a_bundle_is_a_sum() -> None:
    x, y = np.random.default_rng(0).standard_normal((2, 128)).astype(np.float32)
    key = key_of("layer.weight", 128)
    assert set(np.abs(key)) == {1.0}
    assert abs(key.mean()) < 0.3
    assert np.array_equal(bind(bind(x, key), key), x)
    assert np.array_equal(bundle([x, y]), x + y)
    assert not np.array_equal(key, key_of("layer.bias", 128))


def test_vsa_keeps_direction_and_norm() -> None:
    layout = tuple(TensorLayout(f"t{i}", (n,)) for i, n in enumerate((512, 64, 256)))
    codec = codec_of({"codec": "vsa", "dimension_fraction": 0.7, "error_feedback": False}, layout)
    tensors = values(layout, 0)
    payload, _ = codec.encode(tensors, {}, 1)
    assert payload.nbytes == 4 * 512 + 4 * 2 + 4 * 64  # the smallest is sent as it is
    for x, y in zip(tensors, codec.decode(payload, 1), strict=True):
        cosine = float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
        assert cosine > 0.5
        # Least squares: what is left is orthogonal to what was sent.
        assert float(y @ y) == pytest.approx(float(x @ y), rel=1e-3)


def test_small_models_are_not_expanded() -> None:
    layout = (TensorLayout("w", (5, 8)), TensorLayout("b", (5,)))
    codec = codec_of({"codec": "vsa"}, layout)
    tensors = values(layout, 0)
    payload, state = codec.encode(tensors, codec.initial_state(), 0)
    assert codec.bypassed == ("w", "b")
    assert payload.nbytes == 4 * 45
    assert np.array_equal(flat(codec.decode(payload, 0)), flat(tensors))
    assert state == {}


def test_vsa_does_not_depend_on_the_order_of_the_layout() -> None:
    reversed_layout = tuple(reversed(ODD))
    forth, back = codec_of(CODECS["vsa"]), codec_of(CODECS["vsa"], reversed_layout)
    tensors = values(ODD, 0)

    def said(codec: Codec, given: list[FloatArray]) -> list[FloatArray]:
        return codec.decode(codec.encode(given, codec.initial_state(), 9)[0], 9)

    there = said(back, tensors[::-1])[::-1]
    assert all(map(np.array_equal, said(forth, tensors), there))


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.3])
def test_vsa_does_not_lose_a_small_tensor_in_the_noise_of_a_large_one(fraction: float) -> None:
    layout = (TensorLayout("bias", (64,)), TensorLayout("weight", (64, 64)))
    spec = CompressionSpec.parse({"codec": "vsa", "dimension_fraction": fraction})
    tensors = values(layout, 3)
    found = {}
    for numerics in (FIRST, CURRENT):
        codec = make_codec(spec, layout, 3, with_feedback=False, numerics=numerics)
        decoded = codec.decode(codec.encode(tensors, {}, 1)[0], 1)
        found[numerics] = [
            float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
            for x, y in zip(tensors, decoded, strict=True)
        ]
    assert found[FIRST][0] < 0.65
    assert found[CURRENT][0] > 0.999
    # What the small one takes is not taken from the large one.
    assert found[CURRENT][1] > found[FIRST][1] - 0.02


@settings(max_examples=40)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 64, 100, 4096]), min_size=1, max_size=6),
    fraction=st.floats(0.05, 0.9),
)
def test_what_goes_beside_a_bundle_is_little(sizes: list[int], fraction: float) -> None:
    layout = tuple(TensorLayout(f"t{place}", (size,)) for place, size in enumerate(sizes))
    beside = places_beside(layout, fraction, CURRENT)
    assert sum(sizes[place] for place in beside) <= 0.25 * fraction * sum(sizes)
    others = [size for place, size in enumerate(sizes) if place not in beside]
    assert all(sizes[place] <= least for place in beside for least in others)
    spec = CompressionSpec.parse({"codec": "vsa", "dimension_fraction": fraction})
    codec = make_codec(spec, layout, 3)
    tensors = values(layout, 1)
    payload, _ = codec.encode(tensors, codec.initial_state(), 5)
    assert payload.nbytes == codec.payload_bytes <= 4 * sum(sizes)
    decoded = codec.decode(payload, 5)
    assert all(np.array_equal(decoded[place], tensors[place]) for place in beside)
    assert places_beside(layout, fraction, FIRST) == frozenset()


def test_a_bundle_that_overflows_or_of_vectors_of_other_lengths_is_refused() -> None:
    codec = codec_of(CODECS["vsa"], (TensorLayout("w", (4096,)),))
    with pytest.raises(NonFiniteError, match="the bundle of all tensors has values"):
        codec.encode([np.full(4096, 3e38, np.float32)], codec.initial_state(), 0)
    one, three = np.ones(1, np.float32), np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"vector 1 of a bundle has shape \(1,\), the first \(3,"):
        bundle([three, one])
    with pytest.raises(ValueError, match="a bundle of no vectors"):
        bundle([])
    with pytest.raises(ValueError, match=r"a vector of shape \(3,\) and a key of \(1,\)"):
        bind(three, one)


# ---- the section ----


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"codec": "int2"}, "codec: 'int2' is not one of"),
        ({"codec": "int8", "rank": 2}, "rank: belongs to codec low_rank only"),
        ({"codec": "top_k", "k_fraction": 0.0}, "k_fraction: 0.0 is not allowed; must be in"),
        ({"codec": "ternary", "stochastic": True, "error_feedback": True}, "unbiased"),
        ({"codec": "int8", "stochastic": True, "block": 8}, "does not go together with block"),
        ({"codec": "int4", "stochastic": True}, "stochastic: belongs to codec int8 or ternary onl"),
        ({"codec": "ternary", "block": 8}, "block: belongs to codec int8 or int4 only"),
        ({"codec": "none", "error_feedback": True}, "no meaning with codec none"),
        ({"codec": "fp16", "rate": 1}, "rate: unknown key"),
    ],
)
def test_options_that_do_not_fit_are_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        CompressionSpec.parse(document)


def test_the_messages_of_a_step_are_forwarded_where_they_are_fewer_bytes_than_their_sum() -> None:
    assert are_forwarded(2, 49, 100)
    assert not are_forwarded(2, 50, 100)
