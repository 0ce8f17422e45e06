"""Format a fact as a sentence for people, and convert facts to and from their form in the journal.

The log, the CLI, the SDK and the status show the same sentence.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_args

from pydantic import ValidationError

from stratagem.common.base.text import counted, values_text
from stratagem.common.job.fields import range_of, without_spreads
from stratagem.common.numerics.verification import Conclusion
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.courses import how
from stratagem.coordinator.core.facts import KINDS, Fact, Value

# ---- Sentences ----

MAX_NAMES = 8
"""The most names in a sentence."""
MAX_METRICS = 8
"""The most metrics in a sentence; the fact has all."""
_NOT_APPLIED = (
    "warning: none of its steps was applied, for no loss or no gradient was finite; "
    "lower optimizer.lr, or look at the data"
)
_LOSSES = ("loss", "train.loss")


def sentence(fact: f.Fact) -> str:
    """Return a fact as a sentence; for a party below the root it begins with the party's path."""
    kind = type(fact).__name__
    text = _SENTENCES[kind](fact) if kind in _SENTENCES else kind
    party = getattr(fact, "party", f.ROOT)
    return f"{party}: {text}" if party else text


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return metrics as "train.loss 0.11, test.accuracy 0.97": the training loss, then the others
    sorted by name, then the number of those left out."""
    return _few_metrics({name: f"{name} {value:.6g}" for name, value in metrics.items()})


def _few_metrics(texts: Mapping[str, str]) -> str:
    """Join the first few texts, keyed by metric, and add the number of the others."""
    names = sorted(texts, key=lambda name: (name not in _LOSSES, name))
    num_more = len(names) - MAX_METRICS
    more = [counted(num_more, "more metric")] if num_more > 0 else []
    return ", ".join([*(texts[name] for name in names[:MAX_METRICS]), *more])


def _names(members: Sequence[f.Member]) -> str:
    return ", ".join(str(member.worker_id) for member in members) or "nobody"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _by(
    text: str,
    fact: f.RunSubmitted
    | f.RunResumed
    | f.RunDeleted
    | f.RunPinned
    | f.VerificationEnded
    | f.BlobsHeld
    | f.WorkerReleased,
) -> str:
    return f"{text} by {fact.by}" if fact.by else text


def _resumed(fact: f.RunResumed) -> str:
    if fact.from_segment is None:
        return _by("resumed from the last commit", fact)
    anew = "; what else its strategy keeps begins again" if fact.by_policy else ""
    by = f" by {fact.by}" if fact.by else ""
    after = f", as it has failed: {fact.reason}" if fact.reason else ""
    return f"resumed from commit {fact.from_segment} at step {fact.step}{by}{anew}{after}"


def _finished(fact: f.SegmentFinished) -> str:
    more = metrics_text(fact.metrics)
    if not fact.step:  # of a job that trains nothing
        return f"segment {fact.segment} evaluated: {more}"
    text = f"segment {fact.segment} trained to step {fact.step}: train.loss {fact.loss:.6g}"
    if math.isnan(fact.loss) and f.SKIPPED_STEPS in fact.metrics:
        text += f" ({_NOT_APPLIED})"
    redone = (
        f" ({counted(fact.num_redone_steps, 'step')} done again)" if fact.num_redone_steps else ""
    )
    return f"{text}{', ' + more if more else ''}{redone}"


def _evaluated(fact: f.Evaluated) -> str:
    text = f"segment {fact.segment} evaluated"
    if fact.without and not fact.metrics:
        return f"{text} by nobody: all its clients have left"
    if fact.without:
        text += f" without {_few([f'client {client}' for client in fact.without])}, away too long"
    texts = {}
    for name, value in without_spreads(fact.metrics).items():
        ends = range_of(fact.metrics, name)
        over = "" if ends is None else f" (clients {ends[0]:.6g} to {ends[1]:.6g})"
        texts[name] = f"{name} {value:.6g}{over}"
    return f"{text}: {_few_metrics(texts)}"


def _received(fact: f.UpdateReceived) -> str:
    """Return the sentence about an update; a withheld loss, which is NaN, is left out."""
    metrics = {} if math.isnan(fact.loss) else {"loss": fact.loss}
    if fact.spent is not None:
        metrics["privacy.epsilon"] = fact.spent.epsilon
    who = f"round {fact.round_num}: client {fact.client}"
    # A private or masked update withholds its numbers of samples and steps, and counts as one.
    is_told = not math.isnan(fact.loss) or (fact.num_samples, fact.num_steps) != (1, 1)
    over = f" over {counted(fact.num_samples, 'sample')}" if is_told else ""
    text = f"{who} sent its update{over}"
    return ", ".join(filter(None, (text, metrics_text({**metrics, **fact.metrics}))))


def _selected(fact: f.ClientsSelected) -> str:
    text = f"round {fact.round_num}: {counted(len(fact.clients), 'client')} selected"
    excused = [f"{_few(list(map(str, e.clients)))}: {e.reason}" for e in fact.excused]
    return f"{text}; not asked: {'; '.join(excused)}" if excused else text


def _assigned(fact: f.ClientsAssigned) -> str:
    by_worker: dict[str, list[str]] = {}
    for assignment in fact.assignments:
        name = assignment.member.worker_id if assignment.member else "nobody"
        by_worker.setdefault(name, []).append(str(assignment.client))
    parts = [f"{name} trains {', '.join(clients)}" for name, clients in sorted(by_worker.items())]
    return f"round {fact.round_num}: clients assigned: {'; '.join(parts)}"


def _closed(fact: f.RoundClosed) -> str:
    # Most reasons begin with the round, which the sentence names already.
    reason = fact.reason.removeprefix(f"round {fact.round_num}: ")
    text = f"round {fact.round_num} closed: {reason}"
    return f"{text}: {metrics_text(fact.metrics)}" if fact.metrics else text


def _waits(fact: f.RoundWaits) -> str:
    again = f"; asked again: {', '.join(map(str, fact.asked_again))}" if fact.asked_again else ""
    return f"{fact.reason}; the round waits{again}"


def _refuted(fact: f.SegmentRefuted) -> str:
    text = f"segment {fact.segment} was computed wrongly: the replicas of its members differ"
    if fact.digests and len(fact.workers) > 1:
        run, second = (_few(names) for names in fact.workers[:2])
        text = f"segment {fact.segment} computed by {run} differs from that by {second}"
    text += f": {_CONCLUSIONS.get(fact.conclusion, fact.conclusion)}"
    if fact.quarantined:
        return f"{text}; quarantined: {_few(fact.quarantined)}"
    return f"{text}; {_few(fact.marked)} may have been wrong once" if fact.marked else text


def _score(score: float | None) -> str:
    return "invalid" if score is None else f"{score:.6g}"


def _copied(copied: f.Copied) -> str:
    return f"member {copied.member} copies member {copied.donor}"


def _evolved(fact: f.MemberEvolved) -> str:
    text = f"generation {fact.generation}: member {fact.member} scores {_score(fact.score)}"
    return f"{text}; {_copied(fact.copied)}" if fact.copied else text


def _built(fact: f.ModelBuilt) -> str:
    text = f"model built: {fact.num_parameters:,} parameters"
    if fact.structural:
        text += f"; what it is made of depends on {', '.join(fact.structural)}"
    if fact.conversion:
        text += f"; execution.precision: {fact.conversion}"
    return f"{text}; warning: {fact.warning}" if fact.warning else text


def _generation(fact: f.GenerationClosed) -> str:
    scores = ", ".join(_score(score) for score in fact.scores)
    text = f"generation {fact.generation}: scores {scores}; member {fact.best} is best"
    if fact.params:
        text += f" with {values_text(fact.params)}"
    return "; ".join([text, *(_copied(copy) for copy in fact.copied)])


_CONCLUSIONS: Mapping[Conclusion, str] = {
    Conclusion.RUN: "the run was wrong and returns to the state before it",
    Conclusion.VERIFIER: "the verifier was wrong",
    Conclusion.JOB: "the job does not repeat itself, and is verified no more",
    Conclusion.OPEN: "who is wrong is open, and nothing is verified any more",
}

_SENTENCES: Mapping[str, Callable[[Any], str]] = {
    "WorkerRegistered": lambda e: (
        f"worker {e.member.worker_id} registered"
        + (f" at {e.address}" if e.address else ", reached through its tunnel")
    ),
    "WorkerLost": lambda e: f"worker {e.member.worker_id} is lost: {e.reason}",
    "WorkerDraining": lambda e: f"worker {e.member.worker_id} is draining",
    "WorkerLeft": lambda e: f"worker {e.member.worker_id} has left: {e.reason}",
    "WorkerMarked": lambda e: f"worker {e.worker_id} is marked by run {e.run_id}: {e.reason}",
    "WorkerQuarantined": lambda e: (
        f"worker {e.worker_id} is quarantined by run {e.run_id}: {e.reason}"
    ),
    "WorkerReleased": lambda e: _by(f"worker {e.worker_id} released from quarantine", e),
    "WorkersForgotten": lambda e: f"forgotten, as they were lost long ago: {_few(e.names)}",
    "DataUploaded": lambda e: f"{e.owner} has uploaded {e.digest}",
    "RunPinned": lambda e: _by(f"{e.run_id} {'pinned' if e.is_pinned else 'unpinned'}", e),
    "VerificationEnded": lambda e: _by(
        f"{e.run_id} verified: {e.conclusion}, {counted(e.num_equal, 'equal digest')}", e
    ),
    "BlobsHeld": lambda e: _by("a backup was begun", e),
    "ClusterSummed": lambda e: f"the cluster as it was: {counted(len(e.workers), 'worker')}",
    "RunSubmitted": lambda e: _by("submitted", e),
    "RunCancelled": lambda e: e.reason,
    "RunResumed": _resumed,
    "RunFailed": lambda e: f"failed: {e.reason}",
    "RunCompleted": lambda e: f"completed: {e.reason}",
    "StoppedEarly": lambda e: f"completed: {e.reason}",
    "RunReleased": lambda e: "its workers are free again",
    "RunDeleted": lambda e: _by("deleted", e),
    "RunExpired": lambda e: f"deleted: {e.reason}",
    "ReplicasDiffer": lambda e: f"failed: {e.reason}",
    "PartyFailed": lambda e: f"failed: {e.reason}",
    "MembersFormed": lambda e: f"members are {_names(e.members)} ({e.reason})",
    "ProcessDied": lambda e: (
        f"the process of worker {e.member.worker_id} ended during segment {e.segment}"
        f"{how(e.status)}"
    ),
    "ModelBuilt": _built,
    "BuildFailed": lambda e: f"{e.member.worker_id} cannot build the model: {e.reason}",
    "SegmentFinished": _finished,
    "SegmentCommitted": lambda e: (
        f"segment {e.segment} committed at step {e.step}: {e.digest[:12]}, {e.size_bytes:,} bytes"
    ),
    "UploadDue": lambda e: (
        f"commit {e.segment}: uploading what only {_names(e.holders)} "
        f"{'have' if len(e.holders) > 1 else 'has'} of it: {e.reason}"
    ),
    "CommitUploaded": lambda e: (
        f"commit {e.segment} is uploaded as a whole: {e.digest[:12]}, {e.size_bytes:,} bytes"
    ),
    "SoleCopiesLost": lambda e: (
        f"back to the last commit that was uploaded as a whole: of commit {e.segment}, {e.reason}"
    ),
    "Evaluated": _evaluated,
    "ClientEvaluated": lambda e: (
        f"segment {e.segment}: client {e.client} could not evaluate it: {e.reason}"
        if e.reason
        else f"segment {e.segment}: evaluated by client {e.client}"
    ),
    "MetricsMerged": lambda e: (
        f"segment {e.segment}: metrics of {counted(len(e.clients), 'client')} could not be merged: "
        f"{e.reason}"
        if e.reason
        else f"segment {e.segment}: {counted(len(e.clients), 'client')} merged: "
        f"{metrics_text(e.metrics)}"
        + "".join(f"; {metric} is not merged: {why}" for metric, why in e.unmerged.items())
    ),
    "RosterFormed": lambda e: f"roster of {counted(len(e.clients), 'client')} formed",
    "ClientsJoined": lambda e: (
        "joined: " + _few([f"client {client.client} ({client.worker_id})" for client in e.clients])
    ),
    "ClientLeft": lambda e: f"client {e.client} has left: {e.reason}",
    "ClientBenched": lambda e: (
        f"client {e.client} takes no part until round {e.until_round}: {e.reason}"
    ),
    "KeysPosted": lambda e: f"round {e.round_num}: {counted(len(e.clients), 'client')} posted keys",
    "SharesRouted": lambda e: (
        f"round {e.round_num}: {counted(len(e.clients), 'client')} shared secrets"
    ),
    "RoundRestarted": lambda e: (
        f"round {e.round_num}: attempt {e.attempt} with new keys: {e.reason}"
    ),
    "RoundAccounted": lambda e: (
        f"round {e.round_num}: epsilon {e.epsilon:.3g} at delta {e.delta:g} with it, noise "
        f"{e.noise_multiplier:g} times the clipping norm {e.clip_norm:.4g}"
    ),
    "ClientsSelected": _selected,
    "ClientsAssigned": _assigned,
    "UpdateReceived": _received,
    "ClientStateLost": lambda e: (
        f"round {e.round_num}: what client {e.client} had kept is lost, so it begins anew: "
        f"{e.reason}"
    ),
    "UpdateRejected": lambda e: (
        f"round {e.round_num}: the update of client {e.client} is rejected: {e.reason}"
    ),
    "RoundWaits": _waits,
    "SegmentVerified": lambda e: f"segment {e.segment} verified by {_few(e.workers)}",
    "SegmentRefuted": _refuted,
    "Noted": lambda e: f"{e.kind}: {e.reason}" if e.reason else e.kind,
    "PopulationFormed": lambda e: f"population of {counted(len(e.params), 'member')} formed",
    "MemberEvolved": _evolved,
    "GenerationClosed": _generation,
    "RoundClosed": _closed,
    "UpdatesJudged": lambda e: e.reason,
}


# ---- Serialization ----
#
# Decoding also reads the journals of earlier versions. Adding an optional field to a fact keeps
# SCHEMA_VERSION; changing a meaning raises it and adds an entry to UPGRADES.

SCHEMA_VERSION = 1

UPGRADES: Mapping[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Functions that convert a payload to the next version, keyed by (kind, schema version)."""


def encode(fact: Fact) -> tuple[str, str]:
    """Return the kind of a fact, and its payload as JSON."""
    return type(fact).__name__, fact.model_dump_json()


def decode(kind: str, schema_version: int, payload_json: str) -> Fact:
    """Return the fact of a journal entry. Raises ValueError if a newer version has written it."""
    if kind not in KINDS or schema_version > SCHEMA_VERSION:
        raise ValueError(
            f"the journal holds {kind} of schema {schema_version}, written by a newer version; "
            f"this one knows schemas up to {SCHEMA_VERSION}"
        )
    if schema_version == SCHEMA_VERSION:
        try:
            return KINDS[kind].model_validate_json(payload_json)  # in half of the time
        except ValidationError:
            pass  # halves of surrogates are no text for it, and they may have been written
    payload = json.loads(payload_json)
    for version in range(schema_version, SCHEMA_VERSION):
        upgrade = UPGRADES.get((kind, version))
        payload = upgrade(payload) if upgrade else payload
    return KINDS[kind].model_validate(payload)


def _may_lack_parts(annotation: Any) -> bool:
    """Return True if a stored value of this type may lack a field that was added later."""
    if isinstance(annotation, type) and issubclass(annotation, Value):
        parts = annotation.model_fields.values()
        return any(not part.is_required() or _may_lack_parts(part.annotation) for part in parts)
    return any(map(_may_lack_parts, get_args(annotation)))


_FLAT: Final = {
    kind: len(fact.model_fields)
    for kind, fact in KINDS.items()
    if not any(_may_lack_parts(field.annotation) for field in fact.model_fields.values())
}
"""Number of fields per kind of fact without optional parts: a fact with so many lacks none."""


def payload_now(kind: str, fact: Fact, stored: str) -> str:
    """Return the payload of a stored fact as this version writes it: the stored text itself, unless
    fields were added since, or it holds null, which was once written for NaN."""
    is_whole = len(fact.model_fields_set) == _FLAT.get(kind) and "null" not in stored
    return stored if is_whole else fact.model_dump_json()
