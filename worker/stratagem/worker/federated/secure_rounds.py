"""Answer the coordinator's calls in this worker's secure rounds, and provide the masks of updates.

The module translates messages into the steps of secure_client.py and back, and writes the lines of
the site's audit about them. A refusal is an answer with its cause; nothing of a secret is in it, or
in a log.
"""

import hashlib
from collections.abc import Mapping
from typing import Final

import structlog

from stratagem.common.base.errors import (
    InvalidInputError,
    KeysLostError,
    RefusedBySiteError,
    SiteClosedError,
    UnauthenticatedError,
)
from stratagem.common.base.ids import Party, check_party, check_run_id
from stratagem.common.job import JobSpec
from stratagem.common.privacy.secrets import SecureRound
from stratagem.common.schema.document import MAX_COUNT
from stratagem.common.schema.json import JSON
from stratagem.common.strategy import Federated
from stratagem.common.strategy.secure import MAX_SECURE_CLIENTS
from stratagem.v1 import types_pb2
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.federated.secure_client import Masking, SecureClient, SignedKeys
from stratagem.worker.federated.secure_secrets import SecretStore, SignedIdentity, WorkerSigner
from stratagem.worker.site.gate import SiteGate

log = structlog.get_logger(__name__)

MAX_ATTEMPT: Final = 1000
_CAUSES: Final[Mapping[type[Exception], str]] = {
    KeysLostError: "keys_lost",
    SiteClosedError: "outside_window",
}


class SecureRounds:
    """Answers the calls of secure aggregation. Blocks; used from any thread."""

    def __init__(
        self, store: SecretStore, signer: WorkerSigner, site: SiteGate | None = None
    ) -> None:
        self._store, self._signer, self._site = store, signer, site

    def answer(self, request: pb.SecureRoundRequest) -> pb.SecureRoundResponse:
        """Answer the request for one step. Raises InvalidInputError for an invalid request."""
        _check(request)
        with self._store.lock:
            try:
                return self._answer(request)
            except (RefusedBySiteError, InvalidInputError, UnauthenticatedError) as error:
                step = request.WhichOneof("step")
                log.warning("a step of secure aggregation is refused", step=step, reason=str(error))
                cause = _CAUSES.get(type(error), "refused_by_site")
                refusal = pb.SecureRefusal(cause=cause, reason=str(error))
                return pb.SecureRoundResponse(refused=refusal)

    def masking(
        self, of_round: SecureRound, client: int, job_json: str, routed: tuple[int, ...]
    ) -> Masking:
        """Return the masks for an update. Raises RefusedBySiteError."""
        with self._store.lock:
            return self._client(of_round, client).masking(_digest(job_json), routed)

    def keep_update(
        self, of_round: SecureRound, client: int, routed: tuple[int, ...], update: str
    ) -> None:
        """Record the masked update that is about to be sent. Raises RefusedBySiteError if a
        different one may have been sent."""
        with self._store.lock:
            self._client(of_round, client).keep_update(routed, update)

    def forget_run(self, run_id: str) -> None:
        """Delete the secrets of a run that is over."""
        self._store.forget_run(run_id)

    def _client(self, of_round: SecureRound, client: int) -> SecureClient:
        return SecureClient(self._store, self._signer, of_round, client)

    def _answer(self, request: pb.SecureRoundRequest) -> pb.SecureRoundResponse:
        party = Party(request.party)
        of_round = SecureRound(request.run_id, party, request.round_num, request.attempt)
        client = self._client(of_round, request.client)
        match request.WhichOneof("step"):
            case "post_keys":
                keys = self._posted(request, client)
                return self._audited(request, pb.SecureRoundResponse(keys=_keys_proto(keys)))
            case "share_secrets":
                return self._audited(request, self._shares(request, client))
            case "sign_survivors":
                signature = client.sign_survivors(tuple(request.sign_survivors.survivors))
                signed = pb.SurvivorSignature(client=request.client, signature=signature)
                return self._audited(request, pb.SecureRoundResponse(signature=signed))
            case _:
                return self._audited(request, _opened(request, client))

    def _posted(self, request: pb.SecureRoundRequest, client: SecureClient) -> SignedKeys:
        job_json, audit = request.post_keys.job_json, dict[str, JSON]()
        job, digest = JobSpec.from_json(job_json), _digest(job_json)
        strategy = job.strategy
        spec = strategy.options.secure_aggregation if isinstance(strategy, Federated) else None
        if spec is None:
            raise InvalidInputError.at("job_json", "the job has no secure_aggregation")
        if client.check_new(digest) is None and self._site is not None:
            audit.update(self._site.admit(_as_plan(request), job).record)
        return client.post_keys(digest, spec, audit)

    def _shares(
        self, request: pb.SecureRoundRequest, client: SecureClient
    ) -> pb.SecureRoundResponse:
        step = request.share_secrets
        peers = [_keys_from(keys) for keys in step.neighbours]
        pins = None if self._site is None else self._site.site.pins
        sealed = client.share_secrets(tuple(step.members), step.ring_seed, peers, pins)
        shares = [pb.SealedShare(client=c, sealed=data) for c, data in sorted(sealed.items())]
        return pb.SecureRoundResponse(shares=pb.SealedShares(shares=shares))

    def _audited(
        self, request: pb.SecureRoundRequest, answer: pb.SecureRoundResponse
    ) -> pb.SecureRoundResponse:
        """Return an answer after writing it to the site's audit."""
        record = self._store.find((request.run_id, request.party, request.client))
        if self._site is not None and record is not None:
            data = answer.SerializeToString(deterministic=True)
            line: dict[str, JSON] = {
                **record.audit,
                "kind": "secure",
                "attempt": request.attempt,
                "step": request.WhichOneof("step") or "",
                "clients": len(record.survivors or record.routed or record.members),
                "trust": "honest-but-curious coordinator only",
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
            if self._site.site.pins is not None:
                line["trust"] = "pinned peers"
            self._site.write(line)
        return answer


def _opened(request: pb.SecureRoundRequest, secure_client: SecureClient) -> pb.SecureRoundResponse:
    step = request.open_shares
    opened = secure_client.open_shares(
        tuple(step.survivors),
        {signed.client: signed.signature for signed in step.signatures},
        {share.client: share.sealed for share in step.shares},
    )
    shares = [
        pb.OpenedShare(client=client, is_of_mask_key=is_of_key, share=share)
        for client, (is_of_key, share) in sorted(opened.items())
    ]
    return pb.SecureRoundResponse(opened=pb.OpenedShares(shares=shares))


def _check(request: pb.SecureRoundRequest) -> None:
    """Raise InvalidInputError for a malformed request."""
    check_run_id(request.run_id)
    check_party(request.party)
    if request.WhichOneof("step") is None:
        raise InvalidInputError.at("step", "is missing")
    for field, value, most in (
        ("client", request.client, MAX_SECURE_CLIENTS - 1),
        ("round_num", request.round_num, MAX_COUNT),
        ("attempt", request.attempt, MAX_ATTEMPT),
    ):
        if value > most:
            raise InvalidInputError.at(field, f"{value} is not in [0, {most}]")


def _as_plan(request: pb.SecureRoundRequest) -> pb.ExecuteRequest:
    """Return the training plan that corresponds to the request, to ask the site for its
    admission."""
    return pb.ExecuteRequest(
        session=types_pb2.SessionRef(run_id=request.run_id, party=request.party),
        segment=request.round_num,
        job_json=request.post_keys.job_json,
        submitted_by=request.post_keys.submitted_by,
        client_round=pb.ClientRoundPlan(
            client=request.client, secure_mask=pb.SecureMask(attempt=request.attempt)
        ),
    )


def _keys_proto(keys: SignedKeys) -> pb.PostedKeys:
    return pb.PostedKeys(
        client=keys.client,
        share_key=keys.share_key,
        mask_key=keys.mask_key,
        identity=keys.signed.identity,
        issuers=keys.signed.issuers,
        signature=keys.signature,
    )


def _keys_from(keys: pb.PostedKeys) -> SignedKeys:
    signed = SignedIdentity(keys.identity, tuple(keys.issuers))
    return SignedKeys(keys.client, keys.share_key, keys.mask_key, signed, keys.signature)


def _digest(job_json: str) -> str:
    return hashlib.sha256(job_json.encode()).hexdigest()
