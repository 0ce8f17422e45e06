"""Which tensors and modules a model may hold, in one process: exact, or refused with a sentence."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT, KEEPS_DTYPES
from stratagem.worker.engine import Trainer
from stratagem.worker.engine.reports import Tally
from stratagem.worker.exchange.buckets import GradientBuckets
from stratagem.worker.exchange.reducer import SingleMemberReducer, solo_exchange
from stratagem.worker.federated.client_trainer import ClientRunner
from stratagem.worker.host.exit_record import device_fault
from stratagem.worker.models.build import build_model
from stratagem.worker.models.tensors import ModelForm
from tests.cluster.jobs import data_parallel, federated
from tests.jobs import SGD, job, user_model
from tests.odd_kinds import BUILT, EXACT, TRAINED, Kind
from tests.reference.loops import sharded_loop
from tests.worker.engine import gossip_nodes
from tests.worker.engine.support import (
    ALLOWED,
    CPU,
    assert_same_bits,
    in_buckets,
    model_of,
    solo,
    trainer_of,
)

_STEPS = 4


def _train(trainer: Trainer) -> dict[str, Tensor]:
    """Return the model after a few steps and a saved state."""
    exchange = in_buckets(trainer, 2)
    for _ in range(_STEPS):
        trainer.train_step(exchange, range(2), 2)
    trainer.copy_state()
    return model_of(trainer)


def spec_of(kind: Kind) -> JobSpec:
    sections = {"optimizer": SGD, **kind.sections}
    return job(kind.entrypoint, **sections)


@pytest.mark.parametrize("kind", BUILT, ids=str)
def test_what_cannot_be_trained_is_refused_when_it_is_built(kind: Kind) -> None:
    for fresh in (True, False):
        with pytest.raises(InvalidInputError, match=kind.refused):
            trainer_of(spec_of(kind), fresh=fresh)


@pytest.mark.parametrize("kind", TRAINED, ids=str)
def test_what_shows_in_training_is_refused_by_name(kind: Kind) -> None:
    with pytest.raises((InvalidInputError, UserCodeError), match=kind.refused) as caught:
        _train(trainer_of(spec_of(kind)))
    assert device_fault(caught.value) is None, "the causes of an error come to an end"


@pytest.mark.parametrize("kind", [kind for kind in TRAINED if not kind.sections], ids=str)
def test_each_client_of_a_worker_hears_the_same_sentence(kind: Kind) -> None:
    state = {f"model/{name}": tensor for name, tensor in _built(kind).state_dict().items()}
    runner = ClientRunner(federated(kind.entrypoint, batch_size=8), ALLOWED, CPU)
    for client in range(2):
        with pytest.raises((InvalidInputError, UserCodeError), match=kind.refused):
            runner.run(state, client, 2, 1)


@pytest.mark.parametrize("kind", [kind for kind in TRAINED if kind.model == "Thawing"], ids=str)
def test_models_that_train_apart_hear_it_before_they_are_joined(kind: Kind) -> None:
    trainer, exchange = gossip_nodes.trainer(gossip_nodes.gossip_job(kind.entrypoint, 2))
    for _ in range(_STEPS):
        trainer.train_step(exchange, range(2), 2)
    with pytest.raises(UserCodeError, match=kind.refused):
        trainer.end_segment(exchange, Tally())


def test_a_backward_pass_inside_a_forward_pass_is_refused_where_gradients_are_coded() -> None:
    strategy = data_parallel(2)
    model = user_model("odd_models:BackwardInside")
    trainer = trainer_of(job(model, strategy=strategy, compression="ternary"))
    buckets = GradientBuckets(trainer.params, num_extras=trainer.num_extras)
    exchange = solo_exchange(buckets, 2, trainer.compressor)
    with pytest.raises(UserCodeError, match="a micro-batch is one backward"):
        trainer.train_step(exchange, range(2), 2)


def _built(kind: Kind) -> torch.nn.Module:
    return build_model(spec_of(kind), ALLOWED, device=CPU, fresh=True)


@pytest.mark.parametrize("kind", EXACT, ids=str)
def test_what_is_supported_has_the_bits_of_its_loop(kind: Kind) -> None:
    spec = spec_of(kind)
    begun = trainer_of(spec)
    for num_shards in (1, 2):
        trainer = trainer_of(spec, fresh=False)
        trainer.load_state(*begun.copy_state())
        exchange = solo(trainer, num_shards)
        assert isinstance(exchange, SingleMemberReducer) == (num_shards == 1)
        for _ in range(_STEPS):
            trainer.train_step(exchange, range(num_shards), num_shards)
        exchange.close()
        trainer.copy_state()
        expected = sharded_loop(spec, ALLOWED, num_shards, _STEPS)
        assert_same_bits(model_of(trainer), dict(expected.state))


@pytest.mark.parametrize("bag", [False, True])
def test_sparse_gradients_are_made_dense_with_a_word_and_no_other_numbers(bag: bool) -> None:
    ends = []
    for sparse in (True, False):
        model = user_model("odd_models:Embedded", sparse=sparse, bag=bag)
        trainer = trainer_of(job(model))
        assert trainer.setup.notes == [
            f'module "{name}": sparse=True is left out: gradients are exchanged dense, so this '
            "embedding makes dense ones"
            for name in ("words", "unused")
            if sparse
        ]
        ends.append(_train(trainer))
    assert_same_bits(*ends)


@pytest.mark.parametrize("numerics", [KEEPS_DTYPES - 1, CURRENT])
def test_a_parameter_is_made_contiguous_with_a_word_but_not_in_a_run_of_old(numerics: int) -> None:
    spec = job(user_model("odd_models:Shapes", which="strided"))
    trainer = trainer_of(spec, numerics=numerics)
    said = "it is made so, with the same values" if numerics == CURRENT else "it stays so, since"
    (note,) = trainer.setup.notes
    assert note.startswith(f'parameter "scale" is not contiguous in memory: {said}')
    scale = trainer.model.get_parameter("scale")
    assert scale.is_contiguous() == (numerics == CURRENT)


class _Counting(nn.Module):
    """Keeps a buffer with a name like that of extra state, and as extra state what is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("my_extra_state", torch.zeros(1))
        self.kept = torch.tensor([math.nan, 1.0])

    def get_extra_state(self) -> Tensor:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def test_extra_state_is_known_by_its_whole_name_and_no_number_is_the_same_as_itself() -> None:
    model = _Counting()
    form = ModelForm(model, [])
    model.get_buffer("my_extra_state").add_(1)
    form.check()
    model.kept = torch.tensor([math.nan, math.nan])
    with pytest.raises(UserCodeError, match="which get_extra_state returns, changed"):
        form.check()
