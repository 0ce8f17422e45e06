"""States in leaves, backed up and restored into a folder and into a bucket."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from stratagem.client.sdk.client import AsyncClient
from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.ids import Digest
from stratagem.coordinator.app.app import App
from stratagem.coordinator.process.restore import RestoreSettings, restore
from stratagem.coordinator.store.leaves import LeafBlobs
from tests.coordinator.core.jobs import LOCAL, job_text
from tests.coordinator.service.serving import served
from tests.coordinator.store.leaf_states import state
from tests.coordinator.store.places import Bucket
from tests.coordinator.updates.updates import flip_bit
from tests.settings import coordinator_settings

MANIFEST, DATA = state(1)


async def begun_from_a_state(app: App, client: AsyncClient) -> Digest:
    """Store a state in leaves, begin a run from it, and return its digest."""
    assert isinstance(app.blobs, LeafBlobs)
    writer = app.blobs.state_writer(MANIFEST, ())
    writer.write(DATA)
    digest = writer.commit()
    await client.submit({**json.loads(job_text(LOCAL)), "initial": {"digest": digest}}, "mine")
    return digest


def restored(folder: Path, data_dir: Path, settings: Mapping[str, str]) -> tuple[int, int]:
    made = coordinator_settings(data_dir=data_dir, **settings)
    return restore(RestoreSettings.model_construct(**dict(made), folder=folder))


def spoil(data_dir: Path, bucket: Bucket | None, *, removes: bool) -> None:
    """Flip a bit of each leaf, or remove it."""
    files = [*(data_dir / "states" / "leaves").glob("??/*")]
    if bucket is not None and removes:
        bucket.objects().delete(bucket.names("leaves"))
    elif bucket is not None:
        bucket.damage_objects("leaves", 0)
    for leaf in files:
        leaf.unlink() if removes else flip_bit(leaf, 0)


@pytest.mark.parametrize(
    ("place", "removes"),
    [
        ("folder", False),
        pytest.param("folder", True, marks=pytest.mark.sweep),
        pytest.param("bucket", False, marks=pytest.mark.sweep),
        pytest.param("bucket", True, marks=pytest.mark.sweep),
    ],
)
async def test_what_is_damaged_where_a_backup_is_restored_is_written_again(
    tmp_path: Path,
    place: str,
    removes: bool,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data_dir, folder = tmp_path / "a", tmp_path / "copy"
    bucket: Bucket | None = request.getfixturevalue("bucket") if place == "bucket" else None
    settings = {"state_path": "direct"} | ({"blob_store": bucket.url} if bucket else {})
    async with served(data_dir, **settings) as (app, address), AsyncClient(address) as client:
        digest = await begun_from_a_state(app, client)
        assert (await client.back_up(folder)).num_copied == 1
    spoil(data_dir, bucket, removes=removes)
    async with served(data_dir, **settings) as (app, address), AsyncClient(address) as client:
        with pytest.raises(IntegrityError, match=f"{digest} is damaged: .*. It is of run mine: "):
            await client.back_up(tmp_path / "other")
    (data_dir / "journal.sqlite").unlink()
    for is_spoiled in (True, False):
        assert restored(folder, data_dir, settings)[1] == 1
        assert capsys.readouterr().out.count("it is written again") == is_spoiled
        async with served(data_dir, **settings) as (app, address), AsyncClient(address) as client:
            with app.blobs.open(digest) as file:
                assert file.read().endswith(DATA)
            assert (await client.back_up(folder)).num_copied == 0
            app.blobs.collect((digest,), -1.0)
            with app.blobs.open(digest) as file:
                assert file.read().endswith(DATA), "the sound ones have stayed"
        (data_dir / "journal.sqlite").unlink()


async def test_a_damaged_object_is_written_again_where_a_sound_copy_is_in_the_cache(
    tmp_path: Path, bucket: Bucket
) -> None:
    data_dir, folder, settings = tmp_path / "a", tmp_path / "copy", {"blob_store": bucket.url}
    data = {"train": (np.ones((8, 64), np.float32), np.zeros(8, np.int64))}
    async with served(data_dir, **settings) as (_, address), AsyncClient(address) as client:
        run = await client.submit(json.loads(job_text(LOCAL)), "mine", data=data)
        digest = Digest((await run.status()).job["data"]["inline"])
        assert (await client.back_up(folder)).num_copied == 1
    assert list((data_dir / "blob-cache").glob(f"??/{digest}*"))
    bucket.damage(digest, 0)
    (data_dir / "journal.sqlite").unlink()
    assert restored(folder, data_dir, settings)[1] == 1
    with bucket.blobs().open(digest) as file:
        assert file.read()
