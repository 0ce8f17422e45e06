"""No fold commits a number that is not finite, unless the round began with it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.common.base.errors import DivergedError
from stratagem.common.strategy import parse_strategy
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import NUM_AVERAGED_KEY, dtype_named
from stratagem.coordinator.updates.finite_result import fold_rule, server_rule
from stratagem.coordinator.updates.floats import Raw, Wide, storage
from stratagem.coordinator.updates.reading import Source
from stratagem.coordinator.updates.server_optimizer import GlobalAverage, ServerStep, fed_avg_m
from tests.coordinator.updates.fold_round import Round
from tests.coordinator.updates.updates import FEDERATED, accept, manifest_of, rounded, wide
from tests.jobs import job

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
MASK = (0.5, float("-inf"), float("nan"))


def raw_of(dtype: str, values: Sequence[float]) -> Raw:
    return rounded(dtype, np.array(values))


def values_of(dtype: str, data: bytes) -> list[float]:
    return [float(each) for each in wide(dtype, np.frombuffer(data, storage(dtype)))]


class Moved:
    """A combination that gives the same numbers, whatever the updates are."""

    window_elements = 1 << 18

    def __init__(self, *values: float) -> None:
        self.values = values

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        for source in sources:
            source.read(offset, raw)
        start = offset // dtype_named(dtype).item_bytes
        out[:] = np.array(self.values)[start : start + out.size]

    def integers(self, sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        return ""


class BasedRound(Round):
    """A round of one client on a base of these numbers, of two tensors."""

    def __init__(self, root: Path, dtype: str, base: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        super().__init__(root, manifest_of([("a", dtype, (1,)), ("b", dtype, (2,))]))
        self.begin(raw_of(dtype, base).tobytes())
        accept(self.spool, 0, self.manifest, raw_of(dtype, (0.0, 0.0, 0.0)).tobytes())

    def moved(self, *values: float, **options: Any) -> bytes:
        """The next state, where the updates are combined to these numbers."""
        rule = Moved(*values)
        try:
            with self.opened() as (_, state):
                return self.folded(self.entries(), [1.0], combination=rule, base=state, **options)
        except DivergedError:
            assert not list((self.root / "blobs" / "tmp").iterdir()), "nothing of the fold is left"
            raise


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_leaves_the_range_of_its_type_is_named(tmp_path: Path, dtype: str) -> None:
    """float64 has no number beyond it but infinity, and what is beyond float8 is its greatest one;
    the others round what is beyond them to infinity."""
    a_round = BasedRound(tmp_path, dtype)
    beyond = (1e300,) if dtype in ("float32", "float16", "bfloat16") else ()
    for wrong in (-np.inf, np.nan, *beyond):
        with pytest.raises(DivergedError, match=f"leads 'b' beyond the range of {dtype}; lower"):
            a_round.moved(1.0, 1.0, wrong)
    assert values_of(dtype, a_round.moved(1.0, 1.0, -2.0)) == [1.0, 1.0, -2.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_not_finite_before_stays_to_the_bit(tmp_path: Path, dtype: str) -> None:
    """What arithmetic makes of an infinity, and of what is no number, is no change of it."""
    a_round, base = BasedRound(tmp_path, dtype, MASK), raw_of(dtype, MASK)
    assert a_round.moved(0.5, np.nan, np.inf) == base.tobytes()
    assert values_of(dtype, a_round.moved(0.5, 7.0, np.inf))[:2] == [0.5, 7.0], "what is mended"
    with pytest.raises(DivergedError, match="leads 'a' beyond"):
        a_round.moved(np.inf, np.nan, np.inf)


def step(a_round: BasedRound, rate: float, momentum: float = 0.9) -> ServerStep:
    return ServerStep(fed_avg_m(rate, momentum), a_round.store, a_round.base, (), {"round": "1"})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_server_optimizer_is_checked_after_its_numbers_are_rounded(
    tmp_path: Path, dtype: str
) -> None:
    """The base has a mask among its parameters, which stays as it is; its slot stays 0."""
    a_round = BasedRound(tmp_path, dtype, (1.0, 1.0, -np.inf))
    found = a_round.moved(2.0, 1.0, -np.inf, server=step(a_round, 1.0))
    assert values_of(dtype, found)[:2] == [2.0, 1.0]
    assert found[-len(found) // 3 :] == raw_of(dtype, [-np.inf]).tobytes()
    with pytest.raises(DivergedError, match="the server optimizer leads 'a' beyond the range"):
        a_round.moved(4.0, 1.0, -np.inf, server=step(a_round, np.inf))


def test_a_slot_beyond_float32_is_refused_though_the_parameter_is_not(tmp_path: Path) -> None:
    a_round = BasedRound(tmp_path, "float32", (-3e38, 0.0, 0.0))
    with pytest.raises(DivergedError, match="leads 'a' beyond the range of float32"):
        a_round.moved(3e38, 0.0, 0.0, server=step(a_round, 1e-9))


def test_an_average_over_rounds_is_finite_where_the_state_is(tmp_path: Path) -> None:
    a_round = BasedRound(tmp_path, "float64", (0.0, 0.0, -np.inf))

    def average(*before: float) -> GlobalAverage:
        manifest = a_round.manifest
        averaged = replace(manifest, metadata={NUM_AVERAGED_KEY: "1"})
        writer = a_round.store.writer(len(header_bytes(averaged)) + averaged.total_bytes)
        writer.write(header_bytes(averaged))
        writer.write(raw_of("float64", before).tobytes())
        return GlobalAverage(a_round.store, writer.commit(), manifest, 0.5)

    a_round.moved(1.0, 3.0, -np.inf, average=average(3.0, 1.0, -np.inf))
    assert a_round.last is not None
    found = a_round.store.path(a_round.last.average).read_bytes()[-24:]
    assert values_of("float64", found) == [2.0, 2.0, -np.inf]
    with pytest.raises(DivergedError, match="weight_average leads 'b' beyond"):
        a_round.moved(1.0, 1.7e308, -np.inf, average=average(1.0, -1.7e308, -np.inf))


def federated(options: dict[str, Any], **changes: Any) -> Any:
    return parse_strategy({**FEDERATED, "rounds": 1, "options": options, **changes})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "the weighted mean of the updates"),
        ({"normalize": "fednova"}, "strategy.options.normalize"),
        ({"q": 1.0}, "strategy.options.q"),
        ({"control": "scaffold"}, "strategy.options.control"),
        ({"robust": {"name": "median"}}, "strategy.options.robust (median)"),
        ({"secure_aggregation": {"clip": 1.0}}, "the sum of the masked changes"),
    ],
)
def test_every_rule_has_words_and_a_setting(options: dict[str, Any], named: str) -> None:
    rule = fold_rule(job(), federated(options))
    assert named in rule.name
    assert "optimizer.lr" in rule.settings


def test_a_server_optimizer_has_its_name_and_rate() -> None:
    rule = server_rule(federated({"server_optimizer": {"name": "fedavgm", "learning_rate": 1e300}}))
    assert rule.name == "the server optimizer fedavgm"
    assert rule.settings == "strategy.options.server_optimizer.learning_rate (1e+300)"
    yogi = {"method": "FedYogi", "beta1": 0.9, "beta2": 0.99, "tau": 0.01}
    rule = server_rule(federated({}, aggregation=yogi))
    assert rule.settings.startswith("strategy.options.server_learning_rate (")
