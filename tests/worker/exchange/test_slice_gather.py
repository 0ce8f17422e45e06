"""Which tags the gatherings of slices use: those of a step must not meet the next step's."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from stratagem.worker.exchange.slice_owners import divide_slices, keep_sums
from stratagem.worker.exchange.slices import Gathering, GatherRun, LinkSlices, num_gather_tags
from stratagem.worker.exchange.transfer_thread import MeshTransport
from stratagem.worker.mesh import Link
from tests.worker.exchange.cases import Case


class Recorder:
    """Carries nothing; notes what is to be carried."""

    def __init__(self) -> None:
        self.gatherings: list[Gathering] = []

    def run_between(self, _: GatherRun, prepared: Gathering) -> None:
        self.gatherings.append(prepared)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("is_kept", [False, True])
def test_the_gatherings_of_a_step_have_tags_of_their_own_within_the_steps(
    size: int, is_kept: bool
) -> None:
    for rank in range(size):
        _, buckets = Case(1, 1).make_buckets()
        owners = divide_slices(buckets.layout, size)
        kept = None
        if is_kept:
            kept = keep_sums(buckets.layout, owners, rank, buckets.device, is_mirrored=True)
        recorder, link = Recorder(), cast(Link, SimpleNamespace(rank=rank, size=size))
        slices = LinkSlices(
            cast(MeshTransport, recorder), link, buckets, owners, is_mirrored=True, kept=kept
        )
        num_norms = owners.num_norms[rank] + 1
        slices.gather_norms(torch.zeros(num_norms, dtype=torch.float64))
        slices.open_sums()
        if not is_kept:
            slices.open_slices()
        used = [
            {transfer.tag for transfer in (*each.sends, *each.receives)}
            for each in recorder.gatherings
        ]
        tags = set().union(*used)
        assert sum(map(len, used)) == len(tags)
        assert tags <= set(range(num_gather_tags(buckets, owners)))
