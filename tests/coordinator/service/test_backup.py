"""A backup has all that its moment needs, whatever goes on meanwhile, and is restored whole."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.client.sdk.client import AsyncClient
from stratagem.common.base.errors import IntegrityError, InvalidInputError, WrongStateError
from stratagem.common.base.ids import Digest
from stratagem.coordinator.app import keeping
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.pending import needed
from stratagem.coordinator.process.restore import RestoreSettings, restore
from stratagem.coordinator.store.snapshot import TERMS_AHEAD
from tests.coordinator.core.jobs import LOCAL, job_text
from tests.coordinator.service.serving import served
from tests.coordinator.updates.updates import flip_bit
from tests.settings import coordinator_settings


async def submitted(client: AsyncClient, run_id: str, value: float) -> Digest:
    """Start a run with data of its own, and return their digest."""
    job: dict[str, Any] = json.loads(job_text(LOCAL))
    data = {"train": (np.full((8, 64), value, np.float32), np.zeros(8, np.int64))}
    run = await client.submit(job, run_id, data=data)
    return Digest((await run.status()).job["data"]["inline"])


def restore_settings(folder: Path, data_dir: Path) -> RestoreSettings:
    made = coordinator_settings(data_dir=data_dir)
    return RestoreSettings.model_construct(**dict(made), folder=folder)


async def collect(app: App) -> None:
    """Collect blobs, as if all had been written long ago."""
    app.blobs.collect(needed(app.loop.state, await app.backups.held_blobs()), grace_s=-1.0)


async def test_what_a_backup_copies_stays_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copy"
    async with served(tmp_path / "a") as (app, address), AsyncClient(address) as client:
        kept = await submitted(client, "kept", 1.0)
        gone = await submitted(client, "gone", 2.0)
        await (await client.get("kept")).pin()
        async with app.backups.snapshot("client a") as taken:
            assert set(taken.digests) == {kept, gone}
            with pytest.raises(WrongStateError, match="another backup"):
                await client.back_up(folder)
            run = await client.get("gone")
            await run.cancel()
            await run.delete()
            await collect(app)
            assert app.blobs.exists(gone), "a backup may not have copied it yet"
        assert not list((tmp_path / "a" / "backups").iterdir())
        monkeypatch.setattr(keeping, "HOLD_S", -1.0)
        done = await client.back_up(folder)
        assert (done.num_blobs, done.num_copied) == (1, 1), "no list of what an earlier one held"
        assert (await client.back_up(folder)).num_copied == 0
        await collect(app)
        assert app.blobs.exists(gone), "the first hold has not ended"
    with pytest.raises(InvalidInputError, match="has events already"):
        restore(restore_settings(folder, tmp_path / "a"))
    listed = json.loads((folder / "backup.json").read_text())["digests"]
    term, num_blobs = restore(restore_settings(folder, tmp_path / "b"))
    assert (term, num_blobs) == (done.term + TERMS_AHEAD, len(listed))
    async with served(tmp_path / "b") as (app, address), AsyncClient(address) as client:
        assert app.loop.term == term + 1
        (status,) = await client.runs()
        assert (status.run_id, status.pinned) == ("kept", True)
        assert app.blobs.exists(kept)
        assert not app.blobs.exists(gone)


async def test_a_restored_coordinator_holds_nothing_for_backups_of_the_one_before(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "copy"
    async with served(tmp_path / "a") as (app, address), AsyncClient(address) as client:
        gone = await submitted(client, "gone", 1.0)
        assert [(await client.back_up(folder)).num_copied for _ in range(3)] == [1, 0, 0]
        assert gone in needed(app.loop.state, await app.backups.held_blobs())
    restore(restore_settings(folder, tmp_path / "b"))
    async with served(tmp_path / "b") as (app, address), AsyncClient(address) as client:
        assert app.loop.state.holds, "of the first and the second backup"
        assert not any(await app.backups.held_blobs())
        run = await client.get("gone")
        await run.cancel()
        await run.delete()
        await collect(app)
        assert not app.blobs.exists(gone)


async def test_a_damaged_backup_leaves_no_journal_and_can_be_mended(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    async with served(tmp_path / "a") as (_, address), AsyncClient(address) as client:
        kept = await submitted(client, "kept", 1.0)
        await client.back_up(folder)
    path = folder / "blobs" / kept[:2] / f"{kept}.safetensors"
    whole = path.read_bytes()
    flip_bit(path, -1)
    settings = restore_settings(folder, tmp_path / "b")
    with pytest.raises(IntegrityError, match="damaged: its bytes have another digest"):
        restore(settings)
    path.unlink()
    with pytest.raises(IntegrityError, match="missing from the backup"):
        restore(settings)
    path.write_bytes(whole)
    assert restore(settings)[1] == 1
    (folder / "backup.json").write_text("{}")
    with pytest.raises(InvalidInputError, match="no list of a backup"):
        restore(restore_settings(folder, tmp_path / "c"))


async def test_a_blob_that_cannot_be_copied_is_told_with_its_run(tmp_path: Path) -> None:
    async with served(tmp_path / "a") as (app, address), AsyncClient(address) as client:
        await submitted(client, "sound", 1.0)
        bad = await submitted(client, "bad", 2.0)
        path = Path(app.blobs.location(bad))
        for spoil in (partial(flip_bit, at=-1), Path.unlink):
            spoil(path)
            with pytest.raises(IntegrityError, match=rf"blob {bad} is .*\. It is of run bad: put"):
                await client.back_up(tmp_path / "copy")
