"""The section `execution`: presets, fields, and what a job makes of them."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import ExecutionSpec, JobSpec
from stratagem.common.job.execution import (
    PRESETS,
    Accumulated,
    Checkpointed,
    DataParallel,
    PipelineParallel,
)
from stratagem.common.process.cpu_threads import available_cores
from tests.common.job.documents import MINIMAL
from tests.common.strategy.documents import DATA_PARALLEL

FIELDS = ("mode", "gradient", "precision", "memory", "parallelism", "fusion", "profiling")
TABLE = {  # the presets as they are documented
    "training": ("Lazy", "Full", "Single", "Pooled", "Automatic", True, True),
    "inference": ("Eager", "None", "Single", "Cached", "Automatic", True, False),
    "memory_efficient": ("Hybrid", Checkpointed(10), "Mixed", "MinimalPeak", "None", False, False),
    "high_throughput": ("Lazy", "None", "Single", "Pooled", DataParallel(4), True, False),
    "debug": ("Eager", "Full", "Full", "Standard", "None", False, True),
}


def refusal(value: Any) -> str:
    with pytest.raises(InvalidInputError) as raised:
        ExecutionSpec.parse(value)
    return str(raised.value)


def test_a_preset_is_its_row_of_the_table_and_a_field_that_is_given_wins() -> None:
    assert set(PRESETS) == set(TABLE)
    for name, row in TABLE.items():
        spec = ExecutionSpec.parse({"preset": name})
        assert tuple(getattr(spec, field) for field in FIELDS) == row
        fields: dict[str, Any] = dict(zip(FIELDS, row, strict=True))
        assert spec == ExecutionSpec(**fields)
    spec = ExecutionSpec.parse({"preset": "debug", "precision": "Single", "profiling": False})
    assert (spec.precision, spec.profiling, spec.gradient) == ("Single", False, "Full")


def test_changes_make_a_checked_copy_and_go_both_ways() -> None:
    plain = ExecutionSpec()
    changed = plain.with_changes(profiling=True, gradient={"Accumulated": 4})
    assert (plain.profiling, changed.profiling, changed.gradient) == (False, True, Accumulated(4))
    assert changed.with_changes(profiling=False, gradient="Full") == plain
    assert plain.with_changes(preset="debug", mode="Lazy").precision == "Full"
    with pytest.raises(InvalidInputError, match="mode"):
        plain.with_changes(mode="Quick")


def test_what_a_section_says_about_itself() -> None:
    plain = ExecutionSpec()
    assert plain.computes_gradients
    assert (plain.checkpoint_interval, plain.accumulation_steps) == (None, None)
    assert plain.num_workers == 1
    spec = ExecutionSpec(gradient=Checkpointed(5), parallelism=PipelineParallel(3))
    assert (spec.checkpoint_interval, spec.num_workers) == (5, 3)
    assert ExecutionSpec(gradient=Accumulated(7)).accumulation_steps == 7
    assert not ExecutionSpec(gradient="None").computes_gradients
    automatic = ExecutionSpec(parallelism="Automatic")
    assert automatic.num_workers == min(available_cores(), 8)
    assert ExecutionSpec.parse({"precision": "Half", "amp_dtype": "float16"}).amp_dtype
    assert "amp_dtype: belongs to precision Mixed and Half" in refusal({"amp_dtype": "float16"})
    spec = ExecutionSpec.parse({"preset": "memory_efficient", "parallelism": {"DataParallel": 2}})
    assert ";".join(spec.summary().splitlines()) == (
        "Execution:;  Mode: Hybrid;  Gradient: Checkpointed { interval: 10 };  Precision: Mixed;"
        "  Memory: MinimalPeak;  Parallelism: DataParallel { num_workers: 2 };  Fusion: false;"
        "  Profiling: false"
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"gradient": "full"}, "'full' is not one of None, Full, {Checkpointed: n}"),
        ({"gradient": {"Checkpointd": 5}}, "did you mean Checkpointed?"),
        ({"gradient": {"Checkpointed": 0}}, "gradient.Checkpointed: 0 is not allowed"),
        ({"gradient": {"Accumulated": "4"}}, "gradient.Accumulated: '4' is not a whole number"),
        ({"gradient": {"Accumulated": True}}, "True is not a whole number"),
        ({"gradient": {"Checkpointed": 5, "Accumulated": 2}}, "is not one of"),
        ({"parallelism": {"Checkpointed": 5}}, "is not one of DataParallel"),
        ({"preset": "trainig"}, "did you mean training?"),
        ({"preset": ["training"]}, "preset"),
    ],
)
def test_what_is_no_execution_is_refused(value: Any, message: str) -> None:
    assert message in refusal(value)


def test_a_job_keeps_its_variants_in_its_text_and_says_each_once() -> None:
    execution = {"gradient": {"Checkpointed": 5}, "parallelism": {"DataParallel": 2}}
    job = JobSpec.parse({**MINIMAL, "execution": execution})
    assert '"gradient":{"Checkpointed":5}' in job.canonical_json()
    assert JobSpec.from_json(job.canonical_json()) == job
    execution = {"gradient": {"Accumulated": 4}}
    job = JobSpec.parse({**MINIMAL, "execution": execution, "accumulation": {"normalize": "sum"}})
    assert (job.window.steps, job.window.normalize) == (4, "sum")
    with pytest.raises(InvalidInputError, match=r"accumulation\.steps says already"):
        JobSpec.parse({**MINIMAL, "execution": execution, "accumulation": {"steps": 2}})
    with pytest.raises(InvalidInputError, match="65 micro-batches is more than batch_size"):
        JobSpec.parse({**MINIMAL, "execution": {"gradient": {"Accumulated": 65}}})
    with pytest.raises(InvalidInputError, match="which is DataParallel already"):
        JobSpec.parse(
            {**MINIMAL, "strategy": DATA_PARALLEL, "execution": {"parallelism": "Automatic"}}
        )
