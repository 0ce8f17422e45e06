"""What a round of secure aggregation costs: a client's processor time, the bytes that it exchanges
beside its update, and the opening of the sum, with and without clients that drop out.

    python benchmarks/secure_round.py
    python benchmarks/secure_round.py --clients 10 100 --parameters 1000000

Processor time of one process that plays one client and then the coordinator; the keys of the others
are real, and nobody trains. The opening is measured on 20 clients at most, and 20 masks of one that
has dropped out, and counted for all. The bytes take certificates of 600 bytes.
"""

import argparse
import os
import time
from dataclasses import dataclass

import numpy as np

from stratagem.common.base.ids import Party
from stratagem.common.privacy.masks import apply_mask
from stratagem.common.privacy.secrets import (
    SEALED_BYTES,
    ClientSecrets,
    SecureRound,
    dropped_pair_key,
    self_mask_key,
)
from stratagem.common.privacy.sharing import neighbours, reconstruct, shares_needed

ROUND = SecureRound("benchmark", Party(""), 1, 0)
CONTEXT = b"benchmark"
MEASURED = 20
KEYS_BYTES = 64 + 64 + 600 + 67
"""Of a neighbour: its public keys, its signature and certificate, and its share at the end."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The costs of a round with so many clients."""

    num_neighbours: int
    client_s: float
    extra_bytes: int
    unmask_s: float
    unmask_with_lost_s: float


class Round:
    """The keys of all clients of a round, of which one is measured."""

    def __init__(self, num_clients: int, num_parameters: int, threshold: float) -> None:
        self.clients = [ClientSecrets(ROUND, n, os.urandom(32)) for n in range(num_clients)]
        self.around = neighbours(range(num_clients), "auto", bytes(32))
        self.num_words = num_parameters + 1
        """The weight is one more."""
        self.num_needed = shares_needed(threshold, len(self.around[0]) + 1)

    def seal(self) -> dict[int, bytes]:
        """The shares of client 0 for its neighbours."""
        keys = {other: self.clients[other].public.share_key for other in self.around[0]}
        return dict(self.clients[0].sealed_shares(keys, self.num_needed, CONTEXT))

    def mask(self) -> None:
        """What client 0 does to its update."""
        own, words = self.clients[0], np.zeros(self.num_words, "<u4")
        apply_mask(own.self_mask_key, 0, words)
        for other in self.around[0]:
            key = own.pair_mask_key(other, self.clients[other].public.mask_key)
            apply_mask(key, 0, words, subtract=other < 0)

    def opened(self) -> dict[int, bytes]:
        """The shares of client 0's own mask, as its neighbours open them."""
        own_key = self.clients[0].public.share_key
        return {
            other + 1: self.clients[other].opened(0, own_key, share, CONTEXT).self_mask
            for other, share in self.seal().items()
        }

    def unmask(self, num_lost: int) -> float:
        """Seconds in which the coordinator opens the sum, without so many clients."""
        held, total = self.opened(), np.zeros(self.num_words, "<u4")
        num_left = len(self.clients) - num_lost
        num_measured = min(MEASURED, num_left)
        began_s = time.process_time()
        for client in range(num_measured):
            seed = reconstruct(held, self.num_needed, 32)
            apply_mask(self_mask_key(ROUND, client, seed), 0, total, subtract=True)
        taken_s = (time.process_time() - began_s) * num_left / num_measured
        return taken_s + self._remove_lost(held, total, num_left) if num_lost else taken_s

    def _remove_lost(self, held: dict[int, bytes], total: np.ndarray, num_left: int) -> float:
        """Seconds for the masks that those who are lost had in common with the others."""
        lost = len(self.clients) - 1
        left = [other for other in self.around[lost] if other < num_left][:MEASURED]
        began_s = time.process_time()
        reconstruct(held, self.num_needed, 32)
        for other in left:
            public = self.clients[other].public.mask_key
            apply_mask(dropped_pair_key(ROUND, lost, os.urandom(32), other, public), 0, total)
        taken_s = time.process_time() - began_s
        masks = sum(
            other < num_left
            for client in range(num_left, len(self.clients))
            for other in self.around[client]
        )
        return taken_s / len(left) * masks


def measure(num_clients: int, num_parameters: int, threshold: float, lost: float) -> Measured:
    """The costs of one client, and of the coordinator without and with lost clients."""
    played = Round(num_clients, num_parameters, threshold)
    began_s = time.process_time()
    played.seal()
    played.mask()
    client_s = time.process_time() - began_s
    num_neighbours = len(played.around[0])
    extra = num_neighbours * (2 * SEALED_BYTES + KEYS_BYTES)
    num_lost = int(num_clients * lost)
    return Measured(num_neighbours, client_s, extra, played.unmask(0), played.unmask(num_lost))


def main() -> None:
    """Print a row for each number of clients."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--threshold", type=float, default=0.67)
    parser.add_argument("--lost", type=float, default=0.1, help="share of the clients")
    told = parser.parse_args()
    print("| clients | neighbours | client s | extra KB | unmask s | with lost ones |")
    print("|---|---|---|---|---|---|")
    for number in told.clients:
        row = measure(number, told.parameters, told.threshold, told.lost)
        print(
            f"| {number} | {row.num_neighbours} | {row.client_s:.3f} | "
            f"{row.extra_bytes / 1000:.0f} | {row.unmask_s:.2f} | {row.unmask_with_lost_s:.2f} |"
        )


if __name__ == "__main__":
    main()
