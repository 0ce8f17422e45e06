"""The number of the rules that decide a run's bits: given at submit, kept to the end."""

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.numerics.numerics_rules import CURRENT, FIRST, KEEPS_DTYPES, check_numerics
from stratagem.coordinator.core.commands import CancelRun, ResumeRun, SubmitRun
from stratagem.coordinator.core.facts import RunSubmitted
from stratagem.coordinator.core.facts.fact_serialization import decode
from stratagem.coordinator.core.state_machine.apply import apply
from stratagem.coordinator.core.state_machine.decide import decide
from tests.coordinator.core.jobs import job_text
from tests.coordinator.core.simulation import RUN, Simulation, register

pytestmark = pytest.mark.core


def test_a_new_run_gets_the_newest_number_and_keeps_it() -> None:
    simulation = Simulation()
    simulation.tell(register("w0"))
    simulation.tell(SubmitRun(RUN, job_text({"type": "Local"}), 0.0))
    assert simulation.state.runs[RUN].numerics == CURRENT
    simulation.tell(CancelRun(RUN))
    simulation.tell(ResumeRun(RUN))
    assert simulation.state.runs[RUN].numerics == CURRENT


def test_a_run_that_names_no_number_has_the_first() -> None:
    old = decode("RunSubmitted", 1, '{"job_json": "{}", "wall_s": 0.0}')
    assert isinstance(old, RunSubmitted)
    assert old.numerics == FIRST


@pytest.mark.parametrize(
    ("numerics", "means"), [(FIRST, "Single"), (KEEPS_DTYPES - 1, "Single"), (KEEPS_DTYPES, None)]
)
def test_a_run_without_a_precision_means_what_its_rules_say(
    numerics: int, means: str | None
) -> None:
    text = job_text({"type": "Local"})
    assert "precision" not in text
    simulation = Simulation()
    fact = RunSubmitted(job_json=text, wall_s=0.0, numerics=numerics)
    simulation.state = apply(simulation.state, RUN, fact, 0.0)
    assert simulation.state.runs[RUN].job.execution.precision == means
    assert decide(simulation.state, SubmitRun(RUN, text, 0.0)) == ()  # the call is repeated


@pytest.mark.parametrize(("number", "means"), [(0, FIRST), (FIRST, FIRST), (CURRENT, CURRENT)])
def test_no_number_is_the_first(number: int, means: int) -> None:
    assert check_numerics(number) == means


def test_a_number_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=f"numerics: {CURRENT + 1} is not known here"):
        check_numerics(CURRENT + 1)
