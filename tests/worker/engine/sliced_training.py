"""Jobs of members that keep slices, and their training against one trainer that keeps all."""

from typing import Any

import torch

from stratagem.common.job import JobSpec
from stratagem.common.strategy import partitions_parameters
from stratagem.worker.engine import Trainer
from stratagem.worker.engine.gathered_blocks import AbsentParameter
from stratagem.worker.session.states import freeze
from tests.jobs import job, user_data, user_model
from tests.worker.engine.sliced_party import links_over, replicated, sliced_party, told
from tests.worker.engine.support import in_buckets, trainer_of

WIDE = user_model("mlp", hidden=12_007)
"""The first layer has 3 blocks of the norm, and no parameter ends with one."""
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.5}
NUM_SHARDS = 4


def sliced_job(partition_state: str, model: Any = WIDE, **sections: Any) -> JobSpec:
    strategy = {
        "type": "DataParallel",
        "num_replicas": NUM_SHARDS,
        "aggregation": {"method": "AllReduce"},
        "options": {"partition_state": partition_state},
    }
    # 23 rows: the last batch of an epoch has 7, fewer than two for each shard.
    data = user_data("classes", num_rows=23)
    return job(model, **{"optimizer": ADAMW, "data": data, "strategy": strategy, **sections})


# Members are threads here: a model that draws random numbers would draw them from one generator.
def assert_same_training(
    spec: JobSpec, engine: str, size: int, num_steps: int, *, is_mirrored: bool = False
) -> None:
    whole, is_full = trainer_of(spec), partitions_parameters(spec.strategy)
    exchange = in_buckets(whole, NUM_SHARDS)
    with (
        links_over(engine, size) as links,
        sliced_party(spec, links, NUM_SHARDS, is_mirrored=is_mirrored, is_full=is_full) as party,
    ):
        for _ in range(num_steps):
            expected = told(whole.train_step(exchange, range(NUM_SHARDS), NUM_SHARDS))
            assert [told(report) for report in party.step()] == [expected] * size
        assert party.digest() == replicated(whole)
        assert len({trainer.fingerprint() for trainer in party.trainers}) == 1
        for trainer in party.trainers if is_full else ():
            assert all(isinstance(param, AbsentParameter) for _, param in trainer.params)
        if is_mirrored:
            for rank, trainer in enumerate(party.trainers):
                assert_same_slices(party.trainers[rank - 1], trainer)
                assert_same_snapshot(party.trainers[rank - 1], trainer, is_first=rank == 1)
        else:
            assert [trainer.copy_mirror() for trainer in party.trainers] == [None] * size
    exchange.close()


def assert_same_slices(owner: Trainer, mirror: Trainer) -> None:
    assert owner.pieces is not None
    assert mirror.pieces is not None
    (own, own_texts), (kept, kept_texts) = (
        owner.pieces.slices(owner.model, of_mirror=False),
        mirror.pieces.slices(mirror.model, of_mirror=True),
    )
    assert list(own) == list(kept)
    assert own_texts == kept_texts
    assert all(torch.equal(own[name], kept[name]) for name in own)


def assert_same_snapshot(owner: Trainer, mirror: Trainer, *, is_first: bool) -> None:
    """Of what is not divided a part has what is dealt to its member; and so has its mirror."""
    copy = mirror.copy_mirror()
    assert copy is not None
    kept, own = freeze(*copy), freeze(*owner.copy_state(is_first=is_first))
    assert kept.manifest == own.manifest
    assert [bytes(each) for each in kept.buffers] == [bytes(each) for each in own.buffers]
