"""The loss that a model returns: what it is a mean over, and that its parts add up to the whole."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.job import JobSpec
from stratagem.coordinator.effects.evaluate import fold_parts
from stratagem.worker.engine import build_inference
from stratagem.worker.objectives.objective import weight_of
from stratagem.worker.plans.train import parts_to_proto
from tests.jobs import NOT_TRAINED, job, user_data, user_model
from tests.reference.evaluation_loop import evaluation_loop
from tests.reference.loops import plain_loop
from tests.userland.returning import IGNORED, Regression, Words, WordsForCausalLM
from tests.userland.returning import words as WORDS
from tests.worker.engine.support import ALLOWED, CPU, assert_equals_loop, model_of, train
from tests.worker.engine.support import trainer_of as made

MODEL = {"name": "model"}


def words(**kwargs: Any) -> dict[str, Any]:
    return {"entrypoint": "tests.userland.returning:words", "kwargs": kwargs}


def returned(model: str = "WordsForCausalLM", **sections: Any) -> JobSpec:
    data = "numbers" if model == "Regression" else "words"
    given = {"data": {"entrypoint": f"tests.userland.returning:{data}"}, "loss": MODEL, **sections}
    return job(user_model(f"returning:{model}"), **given)


@pytest.mark.parametrize("model", ["WordsForCausalLM", "Words", "Regression"])
def test_parts_of_a_batch_weigh_what_they_count(model: str) -> None:
    """The whole batch, in one go, is what anybody's loop computes."""
    for num_shards in (1, 3):
        assert_equals_loop(returned(model, accumulation={"micro_batch_size": 2}), num_shards)
    kwargs = {} if model == "Regression" else {"dropout": 0.0}
    spec = returned(model, execution={"precision": "Full"})
    spec = JobSpec.parse(
        {**spec.document(), "model": user_model(f"returning:{model}", **kwargs), "batch_size": 20}
    )
    whole = plain_loop(spec, ALLOWED)
    split = JobSpec.parse({**spec.document(), "accumulation": {"micro_batch_size": 2}})
    trainer = made(split)
    torch.testing.assert_close(train(trainer, 4, 10), whole.losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(model_of(trainer), dict(whole.state), rtol=1e-10, atol=1e-12)


class Llava(nn.Module):
    def __init__(self, is_encoder_decoder: bool) -> None:
        super().__init__()
        self.config = type("Config", (), {"is_encoder_decoder": is_encoder_decoder})


class LlavaForConditionalGeneration(Llava):
    pass


class Wrapper(nn.Module):
    def get_base_model(self) -> nn.Module:
        return WordsForCausalLM()


def test_what_a_loss_is_a_mean_over() -> None:
    tokens, classes = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    assert weight_of(WordsForCausalLM(), tokens) == "shifted_labels"
    assert weight_of(type("Mine", (WordsForCausalLM,), {})(), tokens) == "shifted_labels"
    assert weight_of(type("GPT2LMHeadModel", (Words,), {})(), tokens) == "shifted_labels"
    assert weight_of(type("XLNetLMHeadModel", (Words,), {})(), tokens) == "labels"
    assert weight_of(Wrapper(), tokens) == "shifted_labels"
    assert weight_of(LlavaForConditionalGeneration(False), tokens) == "shifted_labels"
    assert weight_of(LlavaForConditionalGeneration(True), tokens) == "labels"
    assert weight_of(Words(), tokens) == "labels"
    assert weight_of(WordsForCausalLM(), classes) == "labels"
    assert weight_of(Regression(), classes.float()) == "rows"
    assert weight_of(Words(), None) == "rows"


def test_a_batch_of_which_nothing_counts_is_said() -> None:
    trainer = made(returned(data=words(num_rows=6, num_empty=6)))
    with pytest.raises(UserCodeError, match="nothing was counted"):
        train(trainer, 2, 1)


def test_an_evaluation_compares_each_output_with_the_label_that_it_predicts() -> None:
    """Of the split's seven rows, the first batches count some labels, and the last one none."""
    metrics = ["accuracy", "perplexity", "tests.userland.returning:correct"]
    evaluation = {"metrics": metrics, "batch_size": 3}
    data = words(num_rows=7, num_empty=1)
    spec = returned(**{**NOT_TRAINED, "evaluation": evaluation, "data": data})
    inference = build_inference(spec, ALLOWED, device=CPU, fresh=True)
    outputs: list[dict[str, Tensor]] = [{} for _ in range(3)]
    parts = [inference.part("test", batch, outputs[batch]) for batch in range(3)]
    means = fold_parts(parts_to_proto(parts), metrics)
    own = inference.evaluator.own
    assert own is not None
    means |= own.measured("test", [part.kept for part in parts if part.kept is not None])
    assert means == evaluation_loop(spec, ALLOWED)
    batches = default_collate(WORDS(num_rows=7, num_empty=1)["test"])
    logits = inference.model(batches["ids"]).logits
    assert torch.equal(torch.cat([each["output"] for each in outputs]), logits)
    places = batches["labels"][:, 1:] != IGNORED
    hits = logits.argmax(-1)[:, :-1] == batches["labels"][:, 1:]
    assert means["test.accuracy"] == hits[places].double().mean().item()
    assert means["test.tests.userland.returning:correct"] == hits[places].sum().item()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": user_data("classes")}, "loss: model calls model(**batch), and the batch is a pa"),
        (
            {"data": words(keys="ids")},
            "loss: model wants WordsForCausalLM to return a loss, and it",
        ),
        (
            {"data": words(keys="ids"), "loss": {**MODEL, "weight": "labels"}},
            "loss.weight: is labels, and the batch has no tensor `labels`; set it to rows",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        train(made(returned(**sections)), 1, 1)
    assert message in str(caught.value)
