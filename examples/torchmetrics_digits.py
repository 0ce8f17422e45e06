"""Metrics of torchmetrics in a job, beside the plain loop that they equal to the bit.

Run it from the root of the repository: python -m examples.torchmetrics_digits
"""

from pathlib import Path

import torch
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

from examples import digits
from stratagem.client import LocalCluster
from stratagem.common.job import JobSpec

BATCH_SIZE = 50


def macro_f1() -> MulticlassF1Score:
    """F1 of all rows, as a mean over classes."""
    return MulticlassF1Score(num_classes=digits.NUM_CLASSES, average="macro")


def auroc() -> MulticlassAUROC:
    """The area under the ROC curve of each class against the others, as a mean over classes."""
    return MulticlassAUROC(num_classes=digits.NUM_CLASSES)


METRICS = {f"examples.torchmetrics_digits:{make.__name__}": make for make in (macro_f1, auroc)}
JOB = {
    "name": "digits-torchmetrics",
    "model": {"entrypoint": "examples.digits:build_model"},
    "data": {"entrypoint": "examples.digits:load"},
    "loss": "cross_entropy",
    "execution": {"gradient": "None"},
    "evaluation": {"metrics": list(METRICS), "batch_size": BATCH_SIZE},
    "strategy": {"type": "DataParallel", "num_replicas": 2, "aggregation": {"method": "AllReduce"}},
}


def plain_loop(state: dict[str, torch.Tensor]) -> dict[str, float]:
    """The same metrics of a state, as one process computes them."""
    model, metrics = digits.build_model().eval(), {name: make() for name, make in METRICS.items()}
    model.load_state_dict(state)
    for x, y in zip(*(part.split(BATCH_SIZE) for part in digits.load()["test"]), strict=True):
        with torch.inference_mode():
            output = model(x)
        for metric in metrics.values():
            metric.update(output, y)
    return {f"test.{name}": float(metric.compute()) for name, metric in metrics.items()}


if __name__ == "__main__":
    cluster = LocalCluster(workers=2, allow=["examples.*:*"], import_path=[Path()])
    with cluster, cluster.client() as client:
        run = client.submit(JobSpec.parse(JOB))
        found, wanted = run.result().status.metrics, plain_loop(run.state_dict())
        for name, value in wanted.items():
            print(f"{name} = {found[name]:.6f} on two workers, {value:.6f} in the plain loop")
