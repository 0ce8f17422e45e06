"""Build: one worker makes the initial model from the seed; its state becomes the first commit."""

from collections.abc import Iterable, Mapping

from stratagem.common.base.errors import SiteClosedError, UnavailableError
from stratagem.common.base.ids import Digest, child_party
from stratagem.common.job import JobSpec
from stratagem.common.process.failpoints import failpoint
from stratagem.common.schema.json import dump_json
from stratagem.common.strategy import Federated, num_shards_of
from stratagem.coordinator.core.effects import Build
from stratagem.coordinator.core.facts import BuildFailed, ErrorRecord, ModelBuilt
from stratagem.coordinator.core.retention import resting_with
from stratagem.coordinator.core.state import RunRecord
from stratagem.coordinator.effects.commit import stored_snapshot
from stratagem.coordinator.effects.context import EffectContext, LiveRuns
from stratagem.coordinator.effects.execute import attend, fail_party, record_of
from stratagem.coordinator.runtime.links import WorkerSession
from stratagem.coordinator.strategies.federated.decisions import may_move, only_one_to_build
from stratagem.coordinator.strategies.federated.rejections import reason_of
from stratagem.coordinator.strategies.federated.run import Federation
from stratagem.coordinator.strategies.population.evolution import variants
from stratagem.v1 import worker_pb2


async def build(env: EffectContext, effect: Build) -> None:
    """Have the worker build the model, pull its state into the store, and report ModelBuilt."""
    job = env.runs.job_of(effect.run_id, effect.party)
    # It has a party to itself, so that building and training never share a key.
    party = child_party(effect.party, "build")
    at = WorkerSession(effect.member, effect.run_id, party, effect.membership)
    plan = worker_pb2.BuildPlan(variants=_variants(env.runs, effect))
    request = env.workers.request(effect.party, at, 0, build=plan)
    asked = {variant.name for variant in plan.variants}
    result = await attend(env, effect.member, request)
    match result.WhichOneof("outcome"):
        case "error" if may_move(job, record_of(result.error)):
            error = record_of(result.error)
            if _is_awaited(env.runs, effect, job, error):
                raise UnavailableError(reason_of(error))
            fact = BuildFailed(
                party=effect.party, member=effect.member, reason=reason_of(error), error=error
            )
            await env.runs.report(effect.run_id, fact)
        case "error":
            await fail_party(env.runs, effect.run_id, effect.party, result.error)
        case "build":
            digest, size_bytes = await _first_state(env, job, at)
            failpoint("coordinator.build.pulled")
            segment, step = _begins_after(job)
            built = ModelBuilt(
                party=effect.party,
                digest=digest,
                size_bytes=size_bytes,
                num_rows=dict(result.build.num_rows),
                num_parameters=result.build.num_parameters,
                layout_digest=result.build.layout_digest,
                structural=tuple(sorted(asked & set(result.build.structural))),
                warning=_warning(job, result.build.num_rows),
                segment=segment,
                step=step,
                streams=await _streams(env.runs, job, result.build.num_rows),
                rows=result.build.rows,
                conversion=result.build.conversion,
            )
            await env.runs.report(effect.run_id, built)
        case _:
            await env.workers.end_early(effect.run_id, effect.member, result)


def _is_awaited(runs: LiveRuns, effect: Build, job: JobSpec, error: ErrorRecord) -> bool:
    """Return True if the build failed because a site is closed now, and no other site can build."""
    value = runs.state.runs[effect.run_id].value
    if error.type != SiteClosedError.__name__ or not isinstance(value, Federation):
        return False
    return only_one_to_build(job, value, runs.loop.world, effect.member)


async def _first_state(env: EffectContext, job: JobSpec, at: WorkerSession) -> tuple[Digest, int]:
    """Return the digest and size of the state that the run begins from: the state that the worker
    has built, or the commit of the other run that this one resumes."""
    initial = job.initial
    if initial is None or not initial.resume:
        digest, manifest = await stored_snapshot(env, [at], 0)
        return digest, manifest.total_bytes
    assert initial.digest is not None  # the client has found it
    manifest, _ = await env.transfers.header(initial.digest)
    return initial.digest, manifest.total_bytes


def _begins_after(job: JobSpec) -> tuple[int, int]:
    """Return the number of the run's first commit, and the number of steps before it; both are 0
    unless the run resumes another. Rounds keep their numbers, which decide their clients and the
    order of their rows."""
    step = (job.initial.step or 0) if job.initial else 0
    return (step if isinstance(job.strategy, Federated) else 0), step


async def _streams(runs: LiveRuns, job: JobSpec, num_rows: Mapping[str, int]) -> str:
    """Return the stream positions in the commit that the run resumes; "" if there are none."""
    initial = job.initial
    if (
        initial is None or not initial.resume or num_rows.get("train")
    ):  # a stream has no such number
        return ""
    assert initial.digest is not None  # the client has found it
    state = runs.state
    records = [*state.runs.values()]
    for run_id in resting_with(state, initial.digest):
        resting = await runs.loop.recorded.run(state, run_id)
        records += [resting] if resting is not None else []
    return streams_of(records, job, initial.digest)


def streams_of(runs: Iterable[RunRecord], job: JobSpec, digest: Digest) -> str:
    """Return the stream positions in the commit with this digest, from a run that reads the same
    rows. Return "" if there is no such run: streams are then read again from the start."""
    commits = (
        commit.streams
        for run in runs
        if _rows_of(run.job) == _rows_of(job)
        for commit in run.commits
        if commit.digest == digest
    )
    return next((streams for streams in commits if streams), "")


def _rows_of(job: JobSpec) -> tuple[object, ...]:
    """Return the parts of a job that decide the order of rows in a stream."""
    return job.seed, job.data, job.code, num_shards_of(job.strategy)


def _warning(job: JobSpec, num_rows: Mapping[str, int]) -> str:
    num_train_rows = num_rows.get("train", 0)  # 0, too, where they come as a stream
    if job.only_evaluates or not num_train_rows or job.batch_size <= num_train_rows:
        return ""
    return (
        f"batch_size {job.batch_size} is larger than the {num_train_rows} rows of the train "
        "split, so every step takes all of them"
    )


def _variants(runs: LiveRuns, effect: Build) -> list[worker_pb2.Variant]:
    """Return variants of a population member's job to build as well, because they show on which
    settings the layout of the model depends."""
    if effect.params is None:
        return []
    tried = variants(runs.state.runs[effect.run_id].job, effect.params)
    return [
        worker_pb2.Variant(name=variant.name, fields_json=dump_json(dict(variant.fields)))
        for variant in tried
    ]
