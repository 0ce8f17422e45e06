"""A coordinator that is to keep its states in an object store."""

from pathlib import Path

import pytest

from stratagem.common.errors import InvalidInputError
from stratagem.coordinator.app import App
from stratagem.coordinator.settings import Settings


async def test_an_object_store_that_cannot_be_used_ends_the_start_before_the_lead_is_taken(
    tmp_path: Path,
) -> None:
    settings = Settings(data_dir=tmp_path, blob_store="bucket/prefix", _cli_parse_args=False)
    with pytest.raises(InvalidInputError, match="blob_store: 'bucket/prefix' is not s3://BUCKET"):
        await App.lead(settings)
    assert not (tmp_path / "journal.sqlite").exists()
