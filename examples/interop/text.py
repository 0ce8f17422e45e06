"""A pipeline of `datasets`: a tokenizer trained on the spot, `map`, padding by the tokenizer.

Nothing here knows Stratagem; text.yaml is the job. `train` is what it replaces.
"""

from functools import cache, partial
from pydoc_data.topics import topics
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import DataCollatorWithPadding, DistilBertConfig, PreTrainedTokenizerFast
from transformers import DistilBertForSequenceClassification as Classifier

from examples.interop import plain_loop

NUM_WORDS, MAX_LENGTH, EPOCHS = 300, 24, 2


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that knows the most frequent words of Python's `help()`."""
    made = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=NUM_WORDS, special_tokens=["[PAD]", "[UNK]"])
    made.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def load() -> DatasetDict:
    """Lines of two topics, tokenized; the label is the topic."""
    texts = [topics[name].splitlines()[:200] for name in ("typesseq", "specialnames")]
    rows = [{"text": line, "labels": n} for n, lines in enumerate(texts) for line in lines if line]
    code = partial(tokenizer(), truncation=True, max_length=MAX_LENGTH)
    coded = Dataset.from_list(rows).map(code, input_columns="text", remove_columns="text")
    return coded.train_test_split(test_size=0.2, seed=0)


def pad(rows: list[dict[str, Any]]) -> Any:
    """A batch as long as its longest row."""
    return DataCollatorWithPadding(tokenizer())(rows)


def build_model() -> Classifier:
    """One layer of width 32, without dropout."""
    sizes: dict[str, Any] = {"dim": 32, "n_layers": 1, "n_heads": 2, "vocab_size": NUM_WORDS}
    sizes |= dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    return Classifier(DistilBertConfig(hidden_dim=64, max_position_embeddings=MAX_LENGTH, **sizes))


def train() -> dict[str, Tensor]:
    """The state after the job's steps, as one process computes it."""
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, eps=1e-6)
    batches = plain_loop.batches(load()["train"], pad, EPOCHS)
    return plain_loop.train(model, batches, optimizer)
