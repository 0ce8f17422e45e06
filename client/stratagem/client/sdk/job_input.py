"""A job as a caller may give it, and the one form that is sent."""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from stratagem.common.job import JobSpec, load_job

Job = JobSpec | Mapping[str, Any] | str | PathLike[str]
"""A job: validated, as a mapping, or the path of a YAML, TOML or JSON file."""


def parse_job(job: Job, inline: str | None = None) -> JobSpec:
    """The validated job; InvalidInputError with one violation per wrong field.

    inline: the digest of uploaded data, which then is the job's data.
    """
    match job:
        case str() | PathLike():
            return load_job(Path(job), [] if inline is None else [f"data={{inline: {inline}}}"])
        case JobSpec() if inline is None:
            return job
        case JobSpec():
            document: Mapping[str, Any] = json.loads(job.canonical_json())
        case _:
            document = job
    changed = document if inline is None else {**document, "data": {"inline": inline}}
    return JobSpec.parse(dict(changed))
