"""Training of every kind has the bits of its loop in tests/reference, undisturbed and resumed."""

from typing import Any

import pytest
import torch

from stratagem.worker.engine.optimizers import _OPTIMIZERS
from stratagem.worker.models.build import build_model
from stratagem.worker.models.tensors import rows_dtype
from tests.every_pair import every_pair, every_value
from tests.jobs import job, user_data, user_model
from tests.reference.loops import plain_loop
from tests.worker.engine.client_rounds import assert_clients_equal_loop, federated
from tests.worker.engine.gossip_nodes import assert_nodes_equal_loop, gossip_job
from tests.worker.engine.support import (
    ALLOWED,
    CPU,
    assert_equals_loop,
    assert_goes_on,
    evaluated,
    is_refused_here,
    model_of,
    train,
    trainer_of,
)

Sections = dict[str, Any]
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ADAM = {"name": "adamw", "lr": 0.01, "clip_norm": 0.5, "schedule": {"name": "cosine"}}
TEN = user_data("classes", num_rows=42)
"""The last batch of an epoch has 10 rows: batch norm cannot train on single ones. By default it has
2, fewer than there are shards."""
NOISY = {"loss": None, "step": "tests.userland.steps:noisy"}
OF_BATCH = {**user_data("noisy_rows"), "collate": "tests.userland.data:noisy_batch"}
CUTS: list[Sections] = [{"micro_batch_size": 3}, {"steps": 4}]
KINDS = [["float64"], ["bfloat16"], ["float16", "float32"], ["float32", "float64", "bfloat16"]]
MEMORY = ["Pooled", "Cached", "MinimalPeak"]
ROWS: dict[str, Sections] = {
    "rows": {"data": user_data("noisy_rows")},
    "rows in micro-batches": {
        "data": OF_BATCH,
        "loss": "tests.userland.losses:loss_of_batch",
        "accumulation": {"micro_batch_size": 3},
    },
}
OWN = "tests.userland.optimizers"
GROUPS = [{"name": "vectors", "max_dims": 1, "lr": 0.003, "decay": 0.5}]
BIASES = [{"name": "biases", "match": ["*.bias"], "lr": 0.02, "weight_decay": 0.0}]
MATRICES = {"name": "muon", "lr": 0.02, "momentum": 0.9, "weight_decay": 0.0}
LION = {"entrypoint": f"{OWN}:lion", "lr": 0.01, "betas": [0.8, 0.9]}


def schedule(entry: str, **optimizer: Any) -> Sections:
    changes = {"name": "adamw", "lr": 0.05, "groups": BIASES, **optimizer}
    return {"optimizer": {**changes, "schedule": f"tests.userland.schedules:{entry}"}}


EVERYWHERE: dict[str, Sections] = {
    **{
        str(cut): {"model": model, "optimizer": ADAM, "accumulation": cut}
        for cut, model in every_value(CUTS, ["dropout_mlp", "everything"])
    },
    "three dtypes": {"model": user_model("in_dtypes", dtypes=KINDS[-1]), "optimizer": ADAM},
    **{
        memory: {
            "model": "everything",
            "data": TEN,
            "execution": {"memory": memory},
            "accumulation": {"steps": 3},
        }
        for memory in MEMORY
    },
    **{name: {"model": "FunctionalDropout", **sections} for name, sections in ROWS.items()},
    "step": {"model": "dropout_mlp", **NOISY, "accumulation": {"micro_batch_size": 3}},
    "mixed": {
        "model": "batch_norm_mlp",
        "data": TEN,
        "execution": {"precision": "Mixed", "amp_dtype": "float16"},
    },
    "half": {"model": "dropout_mlp", "execution": {"precision": "Half"}},
}
"""For replicas, for nodes that gossip, and for federated clients."""
OPTIMIZERS: dict[str, Sections] = {
    **{
        name: {"optimizer": {"name": name, "lr": 0.01}}
        for name in _OPTIMIZERS
        if name not in ("muon", "adafactor")  # of matrices only
    },
    "fused adamw": {"optimizer": {"name": "adamw", "lr": 0.05}, "execution": {"fusion": True}},
    "fused sgd": {"optimizer": SGD, "execution": {"fusion": True}},
    "fused adagrad": {"optimizer": {"name": "adagrad", "lr": 0.05}, "execution": {"fusion": True}},
    "adafactor": {"model": "dropout_mlp", "optimizer": {"name": "adafactor", "lr": 0.01}},
    "own": {
        "model": "dropout_mlp",
        "optimizer": {
            "entrypoint": f"{OWN}:SignMomentum",
            "lr": 0.01,
            "beta": 0.8,
            "groups": GROUPS,
            "schedule": "cosine",
            "clip_norm": 1.0,
        },
    },
    "own factory": {"optimizer": {"entrypoint": f"{OWN}:halves", "lr": 0.01, "weight_decay": 0.1}},
    "several": {
        "model": "dropout_mlp",
        "optimizer": {
            "name": "adamw",
            "lr": 0.003,
            "schedule": "onecycle",
            "clip_norm": 1.0,
            "groups": [
                {"name": "biases", "match": ["*.bias"], "weight_decay": 0.0},
                {"name": "head", "match": ["3.*"], "optimizer": LION},
                {"name": "matrices", "match": ["*.weight"], "optimizer": MATRICES},
            ],
        },
    },
    "own schedule with momentum": schedule("one_cycle", name="sgd", momentum=0.9, weight_decay=0.1),
    "own schedules in a chain": schedule("chained"),
    "own schedule of functions": schedule("lambdas"),
}
TOKENS = {"data": user_data("tokens"), "loss": "token_cross_entropy"}
RESUMED: dict[str, Sections] = {
    "batch norm": {"model": "batch_norm_mlp", "data": user_data("classes", num_rows=44)},
    "everything": {"model": "everything", "optimizer": ADAM},
    "a hidden table": {"model": "HiddenTable"},
    "values that are read": {"model": "reads_values", "optimizer": ADAM},
    "lstm": {"model": "LastOfSequence", "optimizer": ADAM},
    **OPTIMIZERS,
    **{name: EVERYWHERE[name] for name in ("rows in micro-batches", "step", "mixed")},
}
REPLICAS: dict[str, Sections] = {
    **{name: sections for name, sections in EVERYWHERE.items() if name not in RESUMED},
    **{
        "-".join(k): {"model": user_model("in_dtypes", dtypes=k), "optimizer": ADAM}
        for k in KINDS[:-1]
    },
    "a loss of the user's": {"loss": "tests.userland.losses:half_squared"},
    "a weighted loss": {"loss": "tests.userland.losses:weighted"},
    "tokens": {"model": "token_model", **TOKENS},
    "augmentation": {"data": user_data("noisy")},
    "batches of 7": {"model": "dropout_mlp", "batch_size": 7},
    "batches of 1": {"model": "dropout_mlp", "batch_size": 1},
    "batches of 2": {"model": "dropout_mlp", "batch_size": 2},
    "collated": {**EVERYWHERE["rows in micro-batches"], "accumulation": None},
    "plain step": {"loss": None, "step": "tests.userland.steps:plain"},
    "weighted step": {
        "loss": None,
        "step": "tests.userland.steps:weighted",
        "accumulation": {"micro_batch_size": 2},
        "data": user_data("classes", num_rows=48),
    },
    "step of a mapping": {
        "loss": None,
        "step": "tests.userland.steps:of_mapping",
        "data": OF_BATCH,
    },
    "half step": {**EVERYWHERE["step"], "execution": {"precision": "Half"}},
    "checkpointed step": {**EVERYWHERE["step"], "execution": {"gradient": {"Checkpointed": 1}}},
    "callbacks": {
        "model": "dropout_mlp",
        "callbacks": "tests.userland.callbacks:Noisy",
        "optimizer": ADAM,
        "accumulation": {"steps": 2},
    },
}


@pytest.mark.parametrize(
    ("model", "num_shards", "optimizer"),
    every_pair(["mlp", "dropout_mlp", "batch_norm_mlp", "everything"], [1, 2, 3], [SGD, ADAM]),
    ids=lambda value: value["name"] if isinstance(value, dict) else str(value),
)
def test_replicas_of_each_model(model: str, num_shards: int, optimizer: Sections) -> None:
    data = TEN if model == "batch_norm_mlp" else user_data("classes")
    assert_equals_loop(job(model, optimizer=optimizer, data=data), num_shards)


@pytest.mark.parametrize(
    ("case", "num_shards"),
    [*every_value(list(REPLICAS), [3, 1, 2]), ("callbacks", 1)],
)
def test_replicas(case: str, num_shards: int) -> None:
    assert_equals_loop(job(**REPLICAS[case]), num_shards)


@pytest.mark.parametrize(
    ("case", "num_shards"),
    [*every_value(list(RESUMED), [3, 1, 2]), ("step", 1), ("mixed", 1)],
)
def test_replicas_that_are_resumed_in_the_middle_of_an_epoch(case: str, num_shards: int) -> None:
    spec = job(**RESUMED[case])
    tensors, _ = assert_goes_on(spec, num_shards, straight=assert_equals_loop(spec, num_shards))
    if case == "several":
        kept: dict[str, set[str]] = {}
        for name in tensors:
            if name.startswith("optimizer/"):
                _, param, what = name.split("/")
                kept.setdefault(param, set()).add(what)
        moments = {"exp_avg", "exp_avg_sq", "step"}
        assert kept == {
            "0.weight": {"momentum_buffer"},
            "0.bias": moments,
            "3.weight": {"exp_avg"},
            "3.bias": moments,
        }


@pytest.mark.parametrize(
    ("model", "num_shards", "precision", "dtype"),
    every_pair(
        ["dropout_mlp", "batch_norm_mlp", "everything", "LastOfSequence"],
        [1, 2, 3],
        ["Mixed", "Half"],
        ["bfloat16", "float16"],
    ),
)
def test_replicas_in_16_bits(model: str, num_shards: int, precision: str, dtype: str) -> None:
    """Scales of 2^16 are too large for the first steps."""
    execution = {"precision": precision, "amp_dtype": dtype}
    spec = job(model, optimizer=SGD, data=TEN, execution=execution)
    if is_refused_here(spec):
        return
    trainer = assert_equals_loop(spec, num_shards)
    assert all(tensor.dtype != torch.bfloat16 for tensor in model_of(trainer).values())
    single = trainer_of(job(model, optimizer=SGD, data=TEN))
    assert evaluated(trainer_of(spec)) != evaluated(single)
    train(single, num_shards, 5)
    pairs = zip(model_of(trainer).values(), model_of(single).values(), strict=True)
    assert not all(torch.equal(*pair) for pair in pairs)


PLAIN: dict[str, Sections] = {
    "sgd": {"optimizer": SGD},
    "adamw": {"optimizer": ADAM},
    "tokens": {"model": "token_model", **TOKENS, "batch_size": 7, "optimizer": ADAM},
}
"""Weighted by rows or by the tokens that count, of which each micro-batch has another number."""


@pytest.mark.parametrize(
    ("case", "accumulation", "precision"),
    every_pair(list(PLAIN), [None, *CUTS[:2]], ["Full", "Single"]),
    ids=str,
)
def test_shards_and_micro_batches_make_one_big_batch(
    case: str, accumulation: Sections | None, precision: str
) -> None:
    sections = {**PLAIN[case], "execution": {"precision": precision}}
    expected = plain_loop(job(**sections), ALLOWED, 5).state
    for num_shards in (1, 3):
        trainer = trainer_of(job(**sections, accumulation=accumulation))
        train(trainer, num_shards, 5)
        for name, tensor in model_of(trainer).items():
            tolerance = 1e-12 if precision == "Full" else 1e-6
            assert (tensor - expected[name]).abs().max() <= tolerance, name


def test_one_shard_equals_the_plain_loop_in_its_buffers_too() -> None:
    data = user_data("classes", num_rows=48)
    spec = job("batch_norm_mlp", data=data, execution={"precision": "Full"})
    trainer = trainer_of(spec)
    train(trainer, 1, 10)
    for name, tensor in plain_loop(spec, ALLOWED).state.items():
        torch.testing.assert_close(model_of(trainer)[name], tensor, rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", EVERYWHERE)
def test_nodes_that_gossip(case: str) -> None:
    assert_nodes_equal_loop(gossip_job(num_nodes=3, **EVERYWHERE[case]))


@pytest.mark.parametrize("case", EVERYWHERE)
def test_federated_clients(case: str) -> None:
    sections = {**EVERYWHERE[case], "aggregation": {"method": "FedAvg"}, "rounds": 2}
    if case in map(str, CUTS):  # 50 rows on 3 clients: the last batch of an epoch has 2 or 3
        sections |= {"aggregation": {"method": "FedProx", "mu": 0.3}, "batch_size": 7}
    assert_clients_equal_loop(federated(**sections, local_epochs=1 + (case in ROWS)))


@pytest.mark.parametrize("memory", MEMORY)
def test_an_evaluation_does_not_depend_on_the_memory_strategy(memory: str) -> None:
    plain, made = (
        trainer_of(job("everything", data=TEN, execution=execution))
        for execution in ({}, {"memory": memory})
    )
    assert train(made, 3, 4) == train(plain, 3, 4)
    assert evaluated(made) == evaluated(plain)


@pytest.mark.parametrize(
    ("dtypes", "precision", "rows"),
    [
        (["float32"], None, torch.float32),
        (["float64"], None, torch.float64),
        (["bfloat16"], None, None),
        (["float32", "float64"], None, None),
        (["float32", "float64"], "Single", torch.float32),
        (["bfloat16"], "Full", torch.float64),
    ],
    ids=str,
)
def test_rows_follow_the_dtype_of_their_model(
    dtypes: list[str], precision: str | None, rows: torch.dtype | None
) -> None:
    execution = {} if precision is None else {"precision": precision}
    spec = job(user_model("in_dtypes", dtypes=dtypes), execution=execution)
    said: list[str] = []
    for fresh in (True, False):
        model = build_model(spec, ALLOWED, device=CPU, fresh=fresh, say=said.append)
        assert rows_dtype(spec, model) == rows
    assert len(said) == (0 if precision is None else 2)
