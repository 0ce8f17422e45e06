"""To whom uploaded rows and runs belong: to who brought them, across restarts, and not to whoever
knows a digest or comes under the name of somebody who has left."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from stratagem.common.base.ids import Digest, RunId
from stratagem.common.identity.callers import Scope, add_token, new_token, remove_token
from stratagem.common.identity.certificates import Authority
from stratagem.common.rpc.tensor_transfer import push
from stratagem.common.tensors.files import blob_digest
from stratagem.common.tensors.manifest import Purpose, build_manifest, to_proto
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core.apply import apply
from stratagem.coordinator.core.commands import Report
from stratagem.coordinator.core.facts import ROOT, ModelBuilt, RunSubmitted
from stratagem.coordinator.core.retention import has_brought
from stratagem.coordinator.core.state import CoordinatorState
from stratagem.v1 import coordinator_pb2 as pb
from tests.coordinator.core.jobs import LOCAL, job_text
from tests.coordinator.service.serving import refused, submit
from tests.identity.deployment import deployed

Code = grpc.StatusCode
ROWS = [np.arange(7, dtype=np.float32).data.cast("B")]
MANIFEST = build_manifest([("train.x", "float32", (7,))], Purpose.DATA)
DIGEST = blob_digest(MANIFEST, ROWS)
ABSENT = "0" * 64


def header(digest: str = DIGEST) -> pb.UploadDataRequest:
    named = pb.UploadDataHeader(digest=digest, manifest=to_proto(MANIFEST))
    return pb.UploadDataRequest(header=named)


async def upload(stub: Any) -> None:
    await push(stub.UploadData, header(), MANIFEST, ROWS)


async def wanted_from(stub: Any) -> int:
    """The first byte that the coordinator wants of these rows."""
    call = stub.UploadData(iter([header()]))
    answer = await call.read()
    call.cancel()
    return int(answer.resume_offset)


def naming(run_id: str, digest: str = DIGEST) -> pb.SubmitRunRequest:
    return submit(run_id, data={"inline": digest})


async def test_rows_are_for_who_brought_them(authority: Authority, tmp_path: Path) -> None:
    async with deployed(authority, tmp_path) as deployment:
        ann, bob = await deployment.stub("ann"), await deployment.stub("bob")
        await upload(ann)
        await ann.SubmitRun(naming("hers"))
        # The same sentence for what lies here and for what does not.
        told = [await refused(bob.SubmitRun(naming("his", each))) for each in (DIGEST, ABSENT)]
        assert [code for code, _ in told] == [Code.NOT_FOUND] * 2
        sentences = [reason.replace(DIGEST, "X").replace(ABSENT, "X") for _, reason in told]
        assert sentences == ["data.inline: no data set X was uploaded by token bob"] * 2
        code, reason = await refused(bob.SubmitRun(submit("his", initial={"digest": DIGEST})))
        assert code is Code.NOT_FOUND
        assert "that was uploaded by token bob or committed by a run" in reason
        # To name the digest in an upload proves nothing, and tells nothing.
        assert await wanted_from(bob) == 0
        assert (await refused(bob.SubmitRun(naming("his"))))[0] is Code.NOT_FOUND
        assert await wanted_from(ann) == MANIFEST.total_bytes
        # Who has all the bytes may use them.
        await upload(bob)
        await bob.SubmitRun(naming("his"))
        ops = await deployment.stub("admin")
        await ops.SubmitRun(naming("theirs"))
    # After a restart it is as before.
    async with deployed(authority, tmp_path) as deployment:
        for name in ("ann", "bob"):
            await (await deployment.stub(name)).SubmitRun(naming(f"again-{name}"))
        eve = await deployment.stub("eve")
        assert (await refused(eve.SubmitRun(naming("no"))))[0] is Code.NOT_FOUND


async def test_a_committed_state_is_for_all_who_may_read_runs(
    authority: Authority, tmp_path: Path
) -> None:
    """They may download it, too; rows that the same run was given stay its owner's."""
    async with deployed(authority, tmp_path) as deployment:
        ann, bob = await deployment.stub("ann"), await deployment.stub("bob")
        await upload(ann)
        await ann.SubmitRun(naming("hers"))
        app = deployment.app
        writer = app.blobs.writer(5)
        writer.write(b"state")
        state = await asyncio.to_thread(writer.commit)
        built = ModelBuilt(
            party=ROOT,
            digest=state,
            size_bytes=5,
            num_rows={"train": 7},
            num_parameters=1,
            layout_digest="l",
        )
        await app.loop.submit(Report(RunId("hers"), built))
        await bob.SubmitRun(submit("from-active", initial={"digest": state}))
        await ann.CancelRun(pb.CancelRunRequest(run_id="hers"))
        assert RunId("hers") in app.loop.state.ended
        eve = await deployment.stub("eve")
        await bob.CancelRun(pb.CancelRunRequest(run_id="from-active"))
        await eve.SubmitRun(submit("from-ended", initial={"digest": state}))
        assert (await refused(eve.SubmitRun(naming("no"))))[0] is Code.NOT_FOUND


async def test_a_new_token_inherits_nothing_of_a_revoked_one_of_its_name(
    authority: Authority, tmp_path: Path
) -> None:
    async with deployed(authority, tmp_path) as deployment:
        first = await deployment.stub("ci")
        await upload(first)
        await first.SubmitRun(naming("old"))
        remove_token(tmp_path / "tokens.json", "ci")
        (tmp_path / "token-ci").unlink()
        second = await deployment.stub("ci")
        assert await refused(second.CancelRun(pb.CancelRunRequest(run_id="old"))) == (
            Code.PERMISSION_DENIED,
            "run old belongs to an earlier token ci; token ci needs the scope admin",
        )
        assert (await refused(second.SubmitRun(naming("new"))))[0] is Code.NOT_FOUND
        assert (await second.GetRun(pb.GetRunRequest(run_id="old"))).run.submitted_by == "token ci"


async def test_tokens_and_runs_of_earlier_versions_know_each_other(
    authority: Authority, tmp_path: Path
) -> None:
    """They have no more than a name. A token that is made now has more, and does not own them."""
    old, known = new_token("ci", [Scope.SUBMIT])
    tokens = tmp_path / "tokens.json"
    add_token(tokens, known)
    tokens.write_text(tokens.read_text().replace(known.token_id, ""))
    (tmp_path / "token-ci").write_text(old)
    (tmp_path / "token-ci").chmod(0o600)
    async with deployed(authority, tmp_path) as deployment:
        ci = await deployment.stub("ci")
        await ci.SubmitRun(submit("old"))
        assert deployment.app.loop.state.runs[RunId("old")].owner == "token ci"
        await ci.CancelRun(pb.CancelRunRequest(run_id="old"))
    fact = RunSubmitted(
        job_json=job_text(LOCAL, data={"inline": DIGEST}), wall_s=0.0, by="token ci"
    )
    state = apply(CoordinatorState(BUILT_IN), RunId("r"), fact, 0.0)
    assert state.runs[RunId("r")].owner == "token ci"
    assert has_brought(state, "token ci", Digest(DIGEST))
    assert not has_brought(state, "token ci#1", Digest(DIGEST))


async def test_one_token_takes_not_all_places_of_those_who_watch(
    authority: Authority, tmp_path: Path
) -> None:
    async with deployed(authority, tmp_path, max_watchers_each=2) as deployment:
        ann, bob = await deployment.stub("ann"), await deployment.stub("bob")
        await ann.SubmitRun(submit("r"))
        watch, tail = pb.WatchRunRequest(run_id="r"), pb.TailLogsRequest(run_id="r", follow=True)
        held = [ann.WatchRun(watch), ann.TailLogs(tail)]
        for call in held:
            await call.read()
        for refused_call in (ann.WatchRun(watch), ann.TailLogs(tail)):
            assert await refused(refused_call.read()) == (
                Code.RESOURCE_EXHAUSTED,
                "max_watchers_each: token ann has 2 open, the limit for one caller is 2",
            )
        others = bob.WatchRun(watch)
        await others.read()
        for call in (*held, others):
            call.cancel()
