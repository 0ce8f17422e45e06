"""A job file for commands that take one."""

from pathlib import Path

import pytest
import yaml

from tests.client.fake_coordinator import JOB


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    return path
