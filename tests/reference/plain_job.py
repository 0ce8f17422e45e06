"""A job as the reference loops compute it: without the settings that must change no bit."""

from __future__ import annotations

from stratagem.common.job import JobSpec, with_fields


def plainly(job: JobSpec) -> JobSpec:
    """The job without the settings that must change no bit."""
    return with_fields(job, {"execution.gradient": "Full", "execution.memory": "Standard"})
