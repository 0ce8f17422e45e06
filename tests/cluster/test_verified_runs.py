"""Runs that are verified while they train, on workers that compute wrongly."""

from collections.abc import Iterator

import pytest

from tests.cluster.flipping_worker import Flip
from tests.cluster.flips import CASES, EVERYBODY, Bench, bench

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("a run with a wrong bit ends with the right ones, and its author is named"),
]


@pytest.fixture(scope="module")
def flips(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("flips")) as made:
        yield made


@pytest.mark.parametrize(
    ("case", "flip", "conclusions"),
    [
        ("Local", Flip("gradient", 5, 17, 3), ("RUN",)),
        # It is quarantined, and a spare worker is a member.
        ("AllReduce", Flip("activation", 8, 670196, 24, once=False, call=1), ("RUN",)),
        # The replicas are equal, and only the verifier differs from them.
        ("AllReduce", Flip("sum", 5, 17, 3), ("RUN",)),
        ("Pipeline", Flip("moment", 5, 17, 3, once=False), ("RUN",)),
    ],
)
def test_a_wrong_bit_is_found_and_the_run_ends_with_the_right_ones(
    flips: Bench, case: str, flip: Flip, conclusions: tuple[str, ...]
) -> None:
    workers = sorted(flips.undisturbed(case).workers())
    worker = workers[len(workers) // 3]
    attempt = flips.attempt(case, worker, flip)
    assert (attempt.has_changed, attempt.detected, attempt.repaired) == (True,) * 3, attempt.row
    assert (attempt.named, attempt.false_accusations) == (True, frozenset()), attempt.row
    assert attempt.conclusions == conclusions
    assert attempt.quarantined == frozenset(() if flip.once else {worker})


@pytest.mark.parametrize("once", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_a_verifier_that_is_wrong_is_named_and_the_run_goes_on(flips: Bench, once: bool) -> None:
    (verifier,) = flips.undisturbed("ParameterServer").workers(of_verifier=True)
    attempt = flips.attempt("ParameterServer", verifier, Flip("gradient", 5, 17, 3, once=once))
    assert (attempt.detected, attempt.repaired, attempt.named) == (True,) * 3, attempt.row
    assert (attempt.conclusions, attempt.false_accusations) == (("VERIFIER",), frozenset())


@pytest.mark.sweep
def test_who_has_the_mirror_of_a_wrong_slice_is_not_taken_for_its_author(flips: Bench) -> None:
    """It alone differs: the others have copied the wrong slice."""
    flip = Flip("parameter", 11, 271853, 4, once=False)
    attempt = flips.attempt("Mirrors", "worker-2", flip)
    assert (attempt.detected, attempt.repaired) == (True, True), attempt.row
    assert not attempt.quarantined


LONGER = (
    *("FedAvg-coded", "FedYogi", "Median", "Fair", "Nova", "Regions", "Silo-pipelines"),
    *("Turns-clients", "Turns-population"),
)
"""Those that differ from another one in what is folded, or trained, alone."""


@pytest.mark.sweep
@pytest.mark.parametrize("once", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.soak] * (case in LONGER)) for case in CASES],
)
def test_a_wrong_bit_is_found_under_every_strategy(flips: Bench, case: str, once: bool) -> None:
    right = flips.undisturbed(case)
    flip = Flip("gradient", min(5, right.num_steps), 17, 20, once=once)
    on = "members" if case in EVERYBODY else "any"
    attempt = flips.attempt(case, max(right.workers()), flip, on=on)
    assert attempt.detected or not attempt.has_changed, attempt.row
    assert attempt.repaired, attempt.row
    assert not attempt.false_accusations, attempt.row
