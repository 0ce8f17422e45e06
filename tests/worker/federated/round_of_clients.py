"""A secure round without processes: clients with stores of their own, and what passes between."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stratagem.common.job import JobSpec
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.federated.secure_rounds import SecureRounds
from stratagem.worker.federated.secure_secrets import SecretStore, WorkerSigner
from tests.jobs import job

SEED = b"\5" * 32


def secure_job(num_clients: int = 4, **section: Any) -> JobSpec:
    strategy = {
        "type": "Federated",
        "num_clients": num_clients,
        "rounds": 3,
        "aggregation": {"method": "FedAvg"},
        "client_selection": {"method": "All"},
        "options": {"secure_aggregation": section},
    }
    return job(strategy=strategy, optimizer={"name": "sgd", "lr": 0.1})


@dataclass
class RoundOfClients:
    """What a coordinator does of a round, one step at a time."""

    workers: Mapping[int, SecureRounds]
    job: JobSpec = field(default_factory=secure_job)
    round_num: int = 1
    attempt: int = 0

    @classmethod
    def of(cls, num: int = 4, folder: Path | None = None, **section: Any) -> "RoundOfClients":
        workers = {client: worker(client, folder) for client in range(num)}
        return cls(workers, secure_job(num, **section))

    def ask(self, client: int, **step: Any) -> pb.SecureRoundResponse:
        request = pb.SecureRoundRequest(
            run_id="run", client=client, round_num=self.round_num, attempt=self.attempt, **step
        )
        return self.workers[client].answer(request)

    def refusal(self, client: int, **step: Any) -> str:
        answer = self.ask(client, **step)
        assert answer.HasField("refused"), answer
        return f"{answer.refused.cause}: {answer.refused.reason}"

    def post_step(self) -> pb.PostKeys:
        return pb.PostKeys(job_json=self.job.canonical_json())

    def keys(self) -> dict[int, pb.PostedKeys]:
        asked = {client: self.ask(client, post_keys=self.post_step()) for client in self.workers}
        assert not any(answer.HasField("refused") for answer in asked.values()), asked
        return {client: answer.keys for client, answer in asked.items()}

    def share_step(self, client: int, keys: Mapping[int, pb.PostedKeys]) -> pb.ShareSecrets:
        others = [keys[other] for other in sorted(keys) if other != client]
        return pb.ShareSecrets(members=sorted(keys), ring_seed=SEED, neighbours=others)

    def shares(self) -> dict[int, dict[int, bytes]]:
        """The sealed shares by receiver, then by sender."""
        keys, received = self.keys(), dict[int, dict[int, bytes]]()
        for client in keys:
            answer = self.ask(client, share_secrets=self.share_step(client, keys))
            for share in answer.shares.shares:
                received.setdefault(share.client, {})[client] = share.sealed
        return received

    def sign(self, client: int, survivors: Sequence[int]) -> pb.SurvivorSignature:
        answer = self.ask(client, sign_survivors=pb.SignSurvivors(survivors=survivors))
        assert answer.HasField("signature"), answer
        return answer.signature

    def open_step(
        self,
        client: int,
        survivors: Sequence[int],
        signatures: Sequence[pb.SurvivorSignature],
        shares: Mapping[int, Mapping[int, bytes]],
    ) -> pb.OpenShares:
        return pb.OpenShares(
            survivors=survivors,
            signatures=[each for each in signatures if each.client != client],
            shares=[
                pb.SealedShare(client=sender, sealed=data)
                for sender, data in sorted(shares[client].items())
            ],
        )


def worker(
    client: int, folder: Path | None = None, signer: WorkerSigner | None = None
) -> SecureRounds:
    store = SecretStore(None if folder is None else folder / f"secure-{client}")
    return SecureRounds(store, signer or WorkerSigner())
