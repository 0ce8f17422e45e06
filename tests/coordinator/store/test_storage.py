"""A coordinator that is to keep its states in an object store."""

import json
from pathlib import Path

import pytest

from stratagem.client.sdk.client import AsyncClient
from stratagem.common.base.errors import InvalidInputError, UnavailableError, WrongStateError
from stratagem.coordinator.app.app import App
from stratagem.coordinator.runtime.settings import Settings
from stratagem.coordinator.store import bucket as s3
from stratagem.coordinator.store.leaves import LeafBlobs
from tests.coordinator.core.jobs import LOCAL, job_text
from tests.coordinator.open_gate import entrance
from tests.coordinator.service.serving import served
from tests.coordinator.store.leaf_states import state
from tests.coordinator.store.places import Bucket
from tests.coordinator.store.troubled import FORBIDDEN, NOT_IMPLEMENTED, UNAVAILABLE, troubled
from tests.settings import coordinator_settings


def settings(folder: Path, blob_store: str) -> Settings:
    return coordinator_settings(data_dir=folder, blob_store=blob_store)


async def lead_once(found: Settings) -> None:
    app = await App.lead(found, entrance())
    await app.loop.close()


async def test_an_object_store_that_cannot_be_used_ends_the_start_before_the_lead_is_taken(
    tmp_path: Path,
) -> None:
    with pytest.raises(InvalidInputError, match="blob_store: 'bucket/prefix' is not s3://BUCKET"):
        await App.lead(settings(tmp_path, "bucket/prefix"), entrance())
    assert not (tmp_path / "journal.sqlite").exists()


async def test_a_prefix_is_that_of_one_journal(tmp_path: Path, bucket: Bucket) -> None:
    mine, other = settings(tmp_path / "a", bucket.url), settings(tmp_path / "b", bucket.url)
    await lead_once(mine)
    await lead_once(mine)
    for _ in range(2):  # the lead is free again each time
        with pytest.raises(InvalidInputError, match="holds the states of another journal"):
            await App.lead(other, entrance())
    await lead_once(settings(tmp_path / "b", f"{bucket.url}/elsewhere"))
    await lead_once(mine)


async def test_a_store_that_takes_no_signed_requests_ends_the_start_of_direct_states(
    tmp_path: Path, bucket: Bucket, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with troubled(s3_endpoint) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        found = coordinator_settings(data_dir=tmp_path, blob_store=bucket.url, state_path="direct")
        server.always_of_signed = FORBIDDEN
        refused = r"requests that are signed for workers are not carried out: .* 403: Invalid"
        with pytest.raises(InvalidInputError, match=rf"blob_store: {bucket.url}: {refused}"):
            await App.lead(found, entrance())
        assert bucket.names("trial") == []
        server.always_of_signed = None
        await lead_once(found)
        assert server.num_signed > 2
        server.always_of_signed = FORBIDDEN
        await lead_once(settings(tmp_path, bucket.url))


async def test_a_store_that_copies_no_more_is_told_to_who_submits(
    tmp_path: Path, bucket: Bucket, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = {"blob_store": bucket.url, "state_path": "direct"}
    monkeypatch.setitem(s3._RETRIES, "max_retries", 1)
    with troubled(s3_endpoint) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        async with served(tmp_path, **direct) as (app, _):
            assert isinstance(app.blobs, LeafBlobs)
            manifest, data = state(1)
            writer = app.blobs.state_writer(manifest, ())
            writer.write(data)
            digest = writer.commit()
        job = {**json.loads(job_text(LOCAL)), "initial": {"digest": digest}}
        async with (
            served(tmp_path, **direct) as (_, address),
            AsyncClient(address, patience_s=0.0) as client,
        ):
            for answer in (NOT_IMPLEMENTED, FORBIDDEN, UNAVAILABLE):
                server.always_of_copies, passes = answer, answer == UNAVAILABLE
                error = UnavailableError if passes else WrongStateError
                with pytest.raises(error, match=f"copying leaves/.* {answer} ") as told:
                    await client.submit(job, "mine")
                refuses = "(CopyObject), which refuses that" in str(told.value)
                assert refuses == (not passes)
            server.always_of_copies = None
            assert (await client.submit(job, "mine")).run_id == "mine"
