"""Runs that train nothing, over real processes: any number of workers gives the loop's bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import InvalidInputError, NotFoundError, UserCodeError
from stratagem.common.job import JobSpec
from tests.cluster.jobs import (
    ALLOWED,
    Gates,
    Outcome,
    assert_same_bits,
    data_parallel,
    gossip,
    model_parallel,
    outcome_of,
    replicated,
    train,
    wait_for,
)
from tests.jobs import job, user_data
from tests.reference.evaluation_loop import evaluation_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("an evaluation alone has the numbers of one loop"),
]

EVALUATION = {"split": "test", "metrics": ["accuracy", "perplexity"], "batch_size": 2}


USERLAND = "tests.userland.metrics:"
OWN = {
    **EVALUATION,
    "metrics": ["accuracy", *(USERLAND + name for name in ("macro_f1", "extremes", "decaying"))],
}


def evaluating(model: str = "everything", **changes: Any) -> JobSpec:
    nothing = dict.fromkeys(("optimizer", "checkpoint", "steps", "batch_size"))
    execution = {"gradient": "None", **changes.pop("execution", {})}
    sections = {"evaluation": EVALUATION, **nothing, "execution": execution, **changes}
    return job(model, **sections)


@pytest.fixture(scope="module")
def trained(client: Client) -> Outcome:
    measured = {**EVALUATION, "every": "5 steps", "best": "loss", "mode": "min"}
    return train(client, job("everything", checkpoint=None, evaluation=measured))


def test_any_rows_have_their_metrics_and_predictions_in_order_on_three_workers(
    client: Client, tmp_path: Path
) -> None:
    spec = evaluating(strategy=data_parallel(3), evaluation={**OWN, "predictions": True})
    done = train(client, spec)
    outputs: list[Tensor] = []
    assert done.status.metrics == evaluation_loop(spec, ALLOWED, outputs=outputs)
    assert f"test.{USERLAND}extremes.least" in done.status.metrics
    found = load_file(done.run.download(tmp_path / "out.safetensors", "predictions"))
    assert_same_bits(found, {"test.output": torch.cat(outputs)})
    assert found["test.output"].shape == (23, 5)
    assert len(done.of("MembersFormed")[-1].payload["members"]) == 3


@pytest.mark.sweep
def test_the_metrics_of_a_run_are_those_that_it_was_committed_with(
    client: Client, trained: Outcome
) -> None:
    initial = {"run": trained.run.run_id, "which": "best"}
    done = train(client, evaluating(strategy=data_parallel(3), initial=initial))
    best = trained.status.commit("best")
    assert best is not None
    measured = {k: v for k, v in best.metrics.items() if k.startswith("test.")}
    assert done.status.metrics == measured
    assert done.status.job["initial"] == {"digest": best.digest}


@pytest.mark.sweep
def test_a_file_of_weights_is_evaluated_in_other_precision(
    client: Client, trained: Outcome, tmp_path: Path
) -> None:
    path = trained.run.download(tmp_path / "weights.safetensors")
    spec = evaluating(
        initial={"file": str(path)}, execution={"parallelism": "Automatic", "precision": "Full"}
    )
    run = client.submit(spec)
    note = "DataParallel over 4 workers: nothing is exchanged in an evaluation"
    assert run.note == f"strategy: {note}"
    assert outcome_of(run).status.metrics == evaluation_loop(spec, ALLOWED, trained.state)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("protocol", "execution"),
    [
        ({"protocol": "Pipeline", "micro_batch_size": 3}, {}),
        ({"protocol": "Direct"}, {"precision": "Mixed", "memory": "Cached"}),
    ],
)
def test_stages_evaluate_as_one_process_does(
    client: Client, protocol: dict[str, Any], execution: dict[str, Any]
) -> None:
    cut = model_parallel({"0 1": "worker-0", "2 3": "worker-1"}, **protocol)
    spec = evaluating("batch_norm_mlp", strategy=cut, execution=execution)
    done = train(client, spec)
    assert done.status.metrics == evaluation_loop(spec, ALLOWED)
    assert done.status.reason == "23 rows of test evaluated"
    assert done.run.status().commit("final").metrics == done.status.metrics  # type: ignore[union-attr]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "strategy",
    [
        data_parallel(3, "ParameterServer"),
        gossip(3),
        replicated(2, model_parallel({"0": "tag:slow", "1 2": "tag:fast"})),
    ],
    ids=["ParameterServer", "Gossip", "Pipelines"],
)
def test_own_metrics_of_a_run_are_those_of_its_commits(
    client: Client, strategy: dict[str, Any]
) -> None:
    best = {"every": "5 steps", "best": USERLAND + "extremes.most"}
    spec = job(strategy=strategy, checkpoint=None, evaluation={**OWN, **best})
    done = train(client, spec)
    for commit in done.status.commits[1:]:
        state = done.run.state_dict(str(commit.segment))
        measured = {k: v for k, v in commit.metrics.items() if k.startswith("test.")}
        assert measured == evaluation_loop(evaluating("mlp", evaluation=OWN), ALLOWED, state)
    kept = done.status.commit("best")
    assert kept is not None
    most = f"test.{USERLAND}extremes.most"
    assert kept.metrics[most] == max(each.metrics.get(most, -1e9) for each in done.status.commits)


@pytest.mark.sweep
def test_and_members_of_a_population_are_compared_by_one(client: Client) -> None:
    spec = job(
        steps=None,
        checkpoint=None,
        strategy={
            "type": "PopulationBased",
            "population_size": 3,
            "generations": 2,
            "exploit": {"method": "Truncation", "fraction": 0.3},
            "explore": {"method": "Perturbation", "factor": 0.2},
            "options": {"inner": data_parallel(2)},
        },
        search_space={"optimizer.lr": {"low": 0.01, "high": 0.5}},
        steps_per_generation=3,
        evaluation={**OWN, "every": "1 generation", "best": USERLAND + "macro_f1"},
    )
    done = train(client, spec)
    measured = {k: v for k, v in done.status.metrics.items() if k.startswith("test.")}
    assert measured == evaluation_loop(evaluating("mlp", evaluation=OWN), ALLOWED, done.state)


@pytest.mark.sweep
def test_what_does_not_go_is_said_with_the_way_out(client: Client) -> None:
    three = data_parallel(3)
    small = evaluating(evaluation={**OWN, "max_bytes": 23 * 28 - 1}, strategy=three)
    with pytest.raises(UserCodeError, match=r"max_bytes: .* evaluation\.keep names a function"):
        client.submit(small).result()
    wrong = evaluating(evaluation={**OWN, "metrics": [USERLAND + "with_weight"]}, strategy=three)
    with pytest.raises(UserCodeError, match="called once with the outputs and targets of all rows"):
        client.submit(wrong).result()
    kept = {"metrics": [USERLAND + "agreement"], "keep": USERLAND + "best_class"}
    done = train(
        client, evaluating(evaluation={**OWN, **kept, "max_bytes": 23 * 16}, strategy=three)
    )
    plain = train(client, evaluating(evaluation=EVALUATION))
    agreement = done.status.metrics[f"test.{USERLAND}agreement"]
    assert agreement == pytest.approx(plain.status.metrics["test.accuracy"])


@pytest.mark.sweep
def test_training_goes_on_from_a_state_that_was_given(client: Client, trained: Outcome) -> None:
    spec = job("everything", steps=1, checkpoint=None, initial={"run": trained.run.run_id})
    run = client.submit(spec)
    run.result()
    assert_same_bits(run.state_dict("0"), trained.state)


@pytest.mark.sweep
def test_stages_evaluate_again_when_one_of_them_is_killed(
    exact_cluster: LocalCluster, client: Client, gates: Gates
) -> None:
    cut = model_parallel({"0 1": "worker-0", "2": "worker-1"})
    split = {**EVALUATION, "split": "train", "batch_size": 8}
    data = user_data("gated", folder=str(gates.folder))
    spec = evaluating("mlp", data=data, strategy=cut, evaluation=split)
    gates.close("worker-1-batch-2")
    run = client.submit(spec)
    gates.wait_reached("worker-1-batch-2")
    exact_cluster.kill("worker-1")
    wait_for(run, "MembersFormed", 2)
    gates.open()
    assert outcome_of(run).status.metrics == evaluation_loop(spec, ALLOWED)
    exact_cluster.wait_ready()


@pytest.mark.sweep
def test_what_cannot_be_begun_from_is_named(
    client: Client, trained: Outcome, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError, match="has no state '77'; kept is"):
        client.submit(evaluating(initial={"run": trained.run.run_id, "which": "77"}))
    with pytest.raises(NotFoundError, match=r"initial\.digest: no state"):
        client.submit(evaluating(initial={"digest": "0" * 64}))
    with pytest.raises(InvalidInputError, match="No such file"):
        client.submit(evaluating(initial={"file": str(tmp_path / "none.safetensors")}))
    plain = train(client, job(steps=2))
    with pytest.raises(NotFoundError, match=r"has no state '77'; kept are final, 0, 1$"):
        plain.run.download(tmp_path / "none.safetensors", "77")
    with pytest.raises(NotFoundError, match="has no predictions"):
        trained.run.download(tmp_path / "none.safetensors", "predictions")
    run = client.submit(evaluating("mlp", initial={"run": trained.run.run_id}))
    with pytest.raises(UserCodeError, match="initial: missing tensors"):
        run.result()
