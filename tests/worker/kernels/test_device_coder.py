"""A compressor whose gradients lie on a device gives the bits of the one on the host.

Without a GPU "the device" is triton's interpreter on tensors of the CPU: all of the way but
the copies.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import UserCodeError
from stratagem.common.job import CompressionSpec
from stratagem.common.numerics.shards import Node
from stratagem.worker.exchange.buckets import GradientBuckets
from stratagem.worker.exchange.coded_gather import Summing
from stratagem.worker.exchange.coders import DeviceCoder, HostCoder, coder_of
from stratagem.worker.exchange.compressor import Compressor, Portion
from stratagem.worker.exchange.layout import plan_layout
from stratagem.worker.exchange.transports import StepScalars, num_scalars
from tests.common.compression.support import CODECS, ODD, codec_of

HAS_GPU = torch.cuda.is_available()
SHAPES = {"wide": (41, 26), "nothing": (0, 3), "scalar": (), "bias": (7,)}
NAMES = ("ternary", "ternary-plain", "ternary-stochastic", "vsa", "vsa-int8", "vsa-ternary")
DOCUMENTS: dict[str, Any] = {
    **{name: CODECS[name] for name in NAMES if name in CODECS},
    "ternary-plain": {"codec": "ternary", "error_feedback": False},
}
NUM_EXTRAS = num_scalars(len(SHAPES), 0)
pytestmark = [
    pytest.mark.usefixtures("fused"),
    pytest.mark.parametrize(
        "place",
        [
            pytest.param(
                "cpu", marks=pytest.mark.skipif(HAS_GPU, reason="the programs here are the GPU's")
            ),
            pytest.param(
                "cuda:0",
                marks=[
                    pytest.mark.gpu,
                    pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device"),
                ],
            ),
        ],
    ),
]


def gradients(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def compressor_of(name: str, device: torch.device, *, may_skip: bool = False) -> Compressor:
    params = [
        (each, nn.Parameter(torch.zeros(shape, device=device))) for each, shape in SHAPES.items()
    ]
    spec = CompressionSpec.parse(DOCUMENTS[name])
    return Compressor(spec, params, num_extras=NUM_EXTRAS, seed=3, may_skip=may_skip)


@pytest.fixture(autouse=True)
def interpreted(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on tensors of the CPU count as the device's."""
    if place == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return [x.cpu().numpy().tobytes() for x in left] == [x.cpu().numpy().tobytes() for x in right]


def whole(compressor: Compressor) -> Portion:
    """All tensors at once, as on a device."""
    parameters = [(each.name, torch.float32, torch.Size(each.shape)) for each in compressor.layout]
    (portion,) = compressor.portions(plan_layout(parameters, num_extras=NUM_EXTRAS))
    return portion


def code(compressor: Compressor, shard: int, tensors: Sequence[Tensor], extras: Tensor) -> None:
    compressor.weigh(shard, extras[0].item())
    compressor.code(shard, whole(compressor), tensors)
    compressor.end(shard, extras)


class Pair:
    """The same compressor on the host and on the device."""

    def __init__(self, name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = torch.device(place)
        with monkeypatch.context() as patch:
            patch.delenv("TRITON_INTERPRET", raising=False)
            self.host = compressor_of(name, torch.device("cpu"))
        self.there = compressor_of(name, self.device)

    def check_step(self, step: int, scale: float, *, num_shards: int = 1) -> None:
        for compressor in (self.host, self.there):
            compressor.begin_step(step, range(num_shards))
        for shard in range(num_shards):
            plain = gradients(10 * step + shard, scale)
            moved = [each.to(self.device, copy=True) for each in plain]
            extras = torch.full((NUM_EXTRAS,), float(step), dtype=torch.float64)
            extras[0] = 3.0
            code(self.host, shard, plain, extras)
            code(self.there, shard, moved, extras)
            message = self.host.message(shard)
            assert same([message], [self.there.message(shard)])
            assert same(plain, moved)
            adds, there = shard == 0, message.to(self.device)
            self.host.decode(shard, whole(self.host), message, plain, adds=adds)
            found = self.there.decode(shard, whole(self.there), there, moved, adds=adds)
            assert same(plain, moved)
            assert torch.equal(found, extras)
        for compressor in (self.host, self.there):
            compressor.applied()
        before, after = self.host.state(), self.there.state()
        assert before.keys() == after.keys()
        assert same(list(before.values()), list(after.values()))


# What a sketch is coded by makes no difference to the device: one such codec is enough.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "vsa-int8"])
def test_messages_residuals_and_sums_have_the_bits_of_the_host(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(name, place, monkeypatch)
    pair.check_step(0, 1.0)
    # Residuals go to a checkpoint, and from there to whatever codes next.
    state = {key: tensor.cpu() for key, tensor in pair.there.state().items()}
    for compressor in (pair.host, pair.there):
        compressor.load_state(state)
    pair.check_step(1, 0.0)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["ternary", "ternary-stochastic", "vsa-int8"])
def test_many_shards_and_scales(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(name, place, monkeypatch)
    for step, scale in enumerate((1e-30, 1e30)):
        pair.check_step(step, scale, num_shards=2)


@pytest.mark.parametrize("name", ["ternary", "vsa"])
@pytest.mark.parametrize("own", [range(0), range(2, 4)])
def test_messages_are_added_where_the_sum_lies(
    name: str, own: range, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five shards, some of them computed here."""
    pair = Pair(name, place, monkeypatch)
    sums = []
    for compressor in (pair.host, pair.there):
        compressor.begin_step(1, range(5))
    decoded = [gradients(shard) for shard in range(5)]
    for shard, each in enumerate(decoded):
        code(pair.host, shard, each, torch.full((NUM_EXTRAS,), float(shard), dtype=torch.float64))
    for compressor, where in ((pair.host, torch.device("cpu")), (pair.there, pair.device)):
        params = [
            (each, nn.Parameter(torch.zeros(shape, device=where))) for each, shape in SHAPES.items()
        ]
        buckets = GradientBuckets(params, num_extras=NUM_EXTRAS)
        partials = {}
        for shard in own:
            flats, views = buckets.scratch(buckets.all)
            for view, gradient in zip(views, decoded[shard], strict=True):
                view.copy_(gradient)
            flats[-1].fill_(float(shard))
            partials[Node(shard, shard + 1)] = flats
        incoming = {s: pair.host.message(s) for s in range(5) if s not in own}
        portion = whole(compressor)
        sums.append(Summing(buckets, compressor, portion, partials, incoming).total(5))
    assert same(*sums)


@pytest.mark.parametrize("name", ["ternary", "ternary-stochastic", "vsa"])
def test_what_is_not_finite_is_refused_by_name(name: str, place: str) -> None:
    compressor = compressor_of(name, torch.device(place))
    compressor.begin_step(2, range(1))
    spoiled = [each.to(place) for each in gradients(0)]
    spoiled[3][6] = float("nan")
    with pytest.raises(UserCodeError, match="non-finite gradient of bias at step 2"):
        code(compressor, 0, spoiled, torch.ones(NUM_EXTRAS, dtype=torch.float64))
    skipping = compressor_of(name, torch.device(place), may_skip=True)
    skipping.begin_step(2, range(1))
    extras = torch.ones(NUM_EXTRAS, dtype=torch.float64)
    code(skipping, 0, spoiled, extras)
    assert StepScalars.of(extras, len(SHAPES)).is_spoiled
    assert extras.isnan().sum() == 1
    assert not any(each.any() for each in spoiled)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_which_codecs_work_on_the_device(name: str, place: str) -> None:
    spec = CompressionSpec.parse(CODECS[name])
    coder = coder_of(spec, ODD, codec_of(CODECS[name]), torch.device(place))
    kind = DeviceCoder if spec.codec in ("ternary", "vsa") else HostCoder
    assert isinstance(coder, kind)
