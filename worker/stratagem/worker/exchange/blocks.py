"""Bring blocks of parameters over a link, in rounds of all members.

In each round every member names the block that it needs, if any, and all others send it their
parts. So a member that has computed all its shards continues to serve the others, and the order in
which a model calls its blocks need not be known. Rounds have a separate share of the link and a
separate thread, since gradients are summed meanwhile.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from stratagem.worker.exchange.layout import ShardOwners, StepPlan, plan_step
from stratagem.worker.exchange.slice_owners import HeldBlocks
from stratagem.worker.exchange.transfer_thread import MeshTransport, Turn
from stratagem.worker.exchange.transports import Transfer, own_memory, start_transfers
from stratagem.worker.mesh.link import Link
from stratagem.worker.mesh.staging import SideStream

NOTHING: Final = -1
"""The block number that a member sends after it has ended its passes."""
_ROUND: Final = plan_step(ShardOwners(0, 1, 1), 1)
_WISH, _BLOCK = range(2)


class BlockRounds:
    """A `Method` whose step is one round of requests for blocks."""

    suffix = ""
    num_tags = 2

    def __init__(self, link: Link, held: HeldBlocks, own: Sequence[Tensor]) -> None:
        self._link, self._held, self._memory = link, held, own
        self.wishes = [torch.full((1,), NOTHING, device=_device(own)) for _ in range(link.size)]
        self.found: list[Tensor] = []
        """The bytes of the block fetched in the latest round, by rank."""

    def prepare(self, step: StepPlan, sets: Sequence[Sequence[Tensor]]) -> None:
        """Prepare nothing: each round's requests determine its transfers."""

    def run(self, prepared: None, turn: Turn) -> None:
        """Exchange the members' requests, then send and receive parts of the requested blocks."""
        turn.await_launch(0)
        me, peers = self._link.rank, [p for p in range(self._link.size) if p != self._link.rank]
        self._transfer(
            turn,
            [Transfer(peer, _WISH, self.wishes[me]) for peer in peers],
            [Transfer(peer, _WISH, self.wishes[peer]) for peer in peers],
        )
        wanted = [int(wish) for wish in self.wishes]
        sizes = self._held.sizes
        self.found, receives = [], list[Transfer]()
        if wanted[me] != NOTHING:
            self.found = [self._room(rank, wanted[me]) for rank in range(self._link.size)]
            receives = [Transfer(p, _BLOCK, self.found[p]) for p in peers if sizes[p][wanted[me]]]
        sends = [
            Transfer(peer, _BLOCK, self._memory[wanted[peer]])
            for peer in peers
            if wanted[peer] != NOTHING and sizes[me][wanted[peer]]
        ]
        self._transfer(turn, sends, receives)

    def _room(self, rank: int, block: int) -> Tensor:
        if rank == self._link.rank:
            return self._memory[block]
        return self._memory[0].new_empty(self._held.sizes[rank][block])

    def _transfer(self, turn: Turn, sends: list[Transfer], receives: list[Transfer]) -> None:
        received, sent = start_transfers(self._link, turn.first_tag, sends, receives)
        turn.wait(received + sent)


class LinkParameters:
    """A `ParameterTransport` over its own share of a link."""

    def __init__(
        self, link: Link, held: HeldBlocks, device: torch.device, *, deadline_s: float
    ) -> None:
        self.held = held
        self._rank = link.rank
        self._memory = own_memory(held, link.rank, device)
        self._rounds = BlockRounds(link, held, self._memory)
        side = SideStream(device)
        self._transport = MeshTransport(link, self._rounds, side, deadline_s=deadline_s)
        self._number = 0

    def memory(self) -> Sequence[Tensor]:
        """Return for each block the memory in which this member keeps its parts."""
        return self._memory

    def fetch(self, block: int) -> Sequence[Tensor]:
        """Return each rank's part of a block, once all members have requested a block, or ended."""
        self._run_round(block)
        parts, self._rounds.found = self._rounds.found, []
        return parts

    def end_passes(self) -> None:
        """Serve the other members' requests until all have ended their passes."""
        self._run_round(NOTHING)
        while any(int(wish) != NOTHING for wish in self._rounds.wishes):
            self._run_round(NOTHING)

    def updated(self) -> None:
        """Do nothing: a member takes part in a round only after its update."""

    def cut(self) -> None:
        """Make the present round raise. May be called from any thread."""
        self._transport.cut()

    def close(self) -> None:
        """Free the link's share and the thread of the rounds."""
        self._transport.close()

    def _run_round(self, block: int) -> None:
        self._rounds.wishes[self._rank].fill_(block)
        self._number += 1
        self._transport.begin(self._number, _ROUND, (), None)
        self._transport.launch(0)
        self._transport.finish()


def _device(memory: Sequence[Tensor]) -> torch.device:
    return memory[0].device
