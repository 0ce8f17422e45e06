"""Rows that are read ahead: what each kind of training says will come is what comes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stratagem.worker.data.factory import DataFunction
from stratagem.worker.data.reader_batches import ReaderSetup
from stratagem.worker.data.readers import ReaderPool
from stratagem.worker.data.rows import ReadOrder, RowDataset
from stratagem.worker.data.sources import DataSources
from stratagem.worker.engine import EvaluationShare, build_gossip_trainer, build_trainer
from stratagem.worker.federated.client_trainer import ClientRunner
from stratagem.worker.pipeline.build import StageAssignment
from tests.jobs import job
from tests.worker.engine.client_rounds import federated
from tests.worker.engine.gossip_nodes import gossip_job, trainer
from tests.worker.engine.support import (
    ALLOWED,
    CPU,
    assert_same_bits,
    model_of,
    solo,
    train,
    trainer_of,
)
from tests.worker.pipeline.support import Party

ROWS = {"entrypoint": "tests.userland.read_rows:drawn"}
CHANGES: dict[str, Any] = {
    "data": ROWS,
    "accumulation": {"micro_batch_size": 3},
    "evaluation": {"split": "test", "batch_size": 5},
}


class Foreseen:
    """Reads by itself, and only what it was told to expect next."""

    def __init__(self) -> None:
        self.coming: Iterator[ReadOrder] = iter(())
        self.num_read = 0

    def expect(self, coming: Iterator[ReadOrder]) -> None:
        assert next(self.coming, None) is None
        self.coming = coming

    def batch(self, dataset: RowDataset, order: ReadOrder) -> tuple[Any, Any]:
        assert next(self.coming) == order
        self.num_read += 1
        return dataset.read(order)


def everything(splits: list[str]) -> EvaluationShare:
    return EvaluationShare(splits, 0, 1, lambda *_: None, {})


def test_steps_and_evaluations_of_replicas() -> None:
    spec, readers = job("FunctionalDropout", **CHANGES), Foreseen()
    sources = DataSources(readers=readers)
    made = build_trainer(spec, ALLOWED, device=CPU, fresh=True, sources=sources)
    exchange = solo(made, 3)
    for to_step in (3, 10):  # the second segment begins in the middle of an epoch
        made.expect(range(3), 3, to_step)
        while made.step < to_step:
            made.train_step(exchange, range(3), 3)
        made.evaluate(everything(["test"]))
    made.expect(range(1, 2), 3, 12)  # of another view: a second member has taken over the rest
    assert {order.keys.batch[1:3] for order in readers.coming} == {(10, 1), (11, 1)}
    assert readers.num_read > 30
    straight = trainer_of(spec)
    train(straight, 3, 10)
    assert_same_bits(model_of(made), model_of(straight))


def test_steps_of_gossip_nodes() -> None:
    spec, readers = gossip_job("FunctionalDropout", 3, **CHANGES), Foreseen()
    straight, exchange = trainer(spec)
    sources = DataSources(readers=readers)
    made = build_gossip_trainer(spec, ALLOWED, range(3), device=CPU, sources=sources)
    made.load_state(*straight.copy_state())
    made.expect(range(3), 3, 6)
    for _ in range(6):
        made.train_step(exchange, range(3), 3)
    assert next(readers.coming, None) is None


def test_rounds_of_federated_clients() -> None:
    spec = federated("FunctionalDropout", local_epochs=2, **CHANGES)
    readers = Foreseen()
    runner = ClientRunner(spec, ALLOWED, CPU, DataSources(readers=readers))
    state = {n: t for n, t in trainer_of(spec).copy_state()[0].items() if "model/" in n}
    for round_num in (1, 2):
        for client in range(3):
            runner.run(state, client, 3, round_num)
            assert next(readers.coming, None) is None
    assert readers.num_read > 2 * 3 * 2


@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 1, 0)])
def test_stages_that_read(ranks: tuple[int, ...]) -> None:
    data = {"data": ROWS, "steps": 6, "evaluation": CHANGES["evaluation"]}
    spec = job("dropout_mlp", **data)
    placement = StageAssignment((("0",), ("1",), ("2", "3")), ranks, 3, "1f1b")
    readers = [Foreseen() for _ in range(max(ranks) + 1)]
    party = Party(spec, placement, sources=[DataSources(readers=each) for each in readers])
    for runner in party.runners:
        runner.expect(range(1), 1, 6)
    party.train(6)
    party.each(lambda runner: runner.evaluate(everything(["test"])))
    assert not any(next(each.coming, None) for each in readers)
    assert [each.num_read > 0 for each in readers] == [rank != 1 for rank in sorted({*ranks})]


@pytest.mark.sweep  # tests.worker.data.test_readers has processes that read
def test_processes_give_the_same_bits() -> None:
    """Also of a data set that is drawn when it is made."""
    spec = job("FunctionalDropout", **CHANGES)
    function = DataFunction(ROWS["entrypoint"], {}, None)
    pool = ReaderPool(ReaderSetup(function, spec.seed, ALLOWED), 2)
    pool.start()
    sources = DataSources(readers=pool)
    torch.rand(3)  # as others do who share the worker
    made = build_trainer(spec, ALLOWED, device=CPU, fresh=True, sources=sources)
    made.expect(range(3), 3, 10)
    losses = train(made, 3, 10)
    parts = made.evaluate(everything(["test"]))
    pool.stop()
    straight = trainer_of(spec)
    assert losses == train(straight, 3, 10)
    assert parts == straight.evaluate(everything(["test"]))
    assert_same_bits(model_of(made), model_of(straight))
