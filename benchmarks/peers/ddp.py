"""Training as a user of torchrun writes it: plain DDP over gloo, and nothing else.

    torchrun --standalone --nproc-per-node 2 benchmarks/peers/ddp.py mlp 100

Rows are gathered from tensors in memory, which no DataLoader does faster. With `alone` behind it
nothing is exchanged, which is the floor of a step.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers.training import GLOBAL_BATCH, NUM_BATCHES, Marked, load, loss


def main(name: str, steps: int, *, is_alone: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model: torch.nn.Module = Marked(name)
    if not is_alone:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, targets = load(name)["train"]
    batch = GLOBAL_BATCH[name]
    order = torch.arange(len(inputs))
    for step in range(steps):
        epoch, place = divmod(step, NUM_BATCHES)
        if place == 0:
            order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
        rows = order[place * batch : (place + 1) * batch][rank::size]
        optimizer.zero_grad()
        loss(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), is_alone="alone" in sys.argv[3:])
