"""What a job without gradients means: one process that evaluates batch after batch.

Shares model, data, loss, metrics, precision and compiled code with the engine, but none of its
sums, sharing and state; any number of workers must equal it to the bit.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.worker.data.datasets import Gather
from stratagem.worker.data.sources import DataSources, load_data
from stratagem.worker.models.build import build_model
from stratagem.worker.models.tensors import rows_dtype
from stratagem.worker.numerics.model import prepare
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.objectives.evaluator import make_metrics
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.hooks import Hooks
from tests.reference.objective import objective_of, prediction_of
from tests.reference.row_batches import read


def evaluation_loop(
    job: JobSpec,
    entrypoints: EntryPoints,
    state: Mapping[str, Tensor] | None = None,
    outputs: list[Tensor] | None = None,
) -> dict[str, float]:
    """Means over the split, by "<split>.<metric>". state: a state_dict; else the seed's weights.
    outputs: gets the model's output of each batch. A metric of the user's own is computed once, of
    all rows: a function of them, or an object that is updated batch by batch."""
    spec, device = job.evaluation, torch.device("cpu")
    assert spec is not None
    dataset = load_data(job, entrypoints, DataSources())[spec.split]
    model = build_model(job, entrypoints, device=device, fresh=True)
    Hooks(job, entrypoints).build(model)
    if state is not None:
        model.load_state_dict(state)
    model.eval()
    objective, gather = objective_of(job, entrypoints), Gather(rows_dtype(job, model), device)
    predict = prediction_of(job, entrypoints)
    metrics = make_metrics(spec.metrics, entrypoints)
    randomness = KeyedRandomness(model, device)
    execution = prepare(model, job, device, randomness)
    sums: dict[str, list[float]] = {}
    kept: list[tuple[Tensor, Tensor]] = []
    for batch, start in enumerate(range(0, len(dataset), spec.batch_size)):
        rows = torch.arange(start, min(start + spec.batch_size, len(dataset)))
        key = ("evaluate", spec.split, batch)
        x, y = read(gather, dataset, rows, ("row", "evaluate", spec.split), key, randomness)
        execution.begin_batch(len(rows))
        with torch.no_grad():
            loss = objective(model, x, y, len(rows))
            output, target = predict(model, x, y)
            if outputs is not None:
                outputs.append(output)
            kept.append((output, target))
            means = {"loss": (float(loss.mean), loss.weight)}
            means |= {name: metric(output, target, len(rows)) for name, metric in metrics.items()}
        for name, (mean, weight) in means.items():
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += mean * weight
            total[1] += weight
    found = {f"{spec.split}.{name}": total / weight for name, (total, weight) in sums.items()}
    if "perplexity" in spec.metrics:
        found[f"{spec.split}.perplexity"] = math.exp(found[f"{spec.split}.loss"])
    for name in (each for each in spec.metrics if ":" in each):
        value = _whole(entrypoints.resolve(name), kept)
        values = value if isinstance(value, Mapping) else {"": value}
        for part, number in values.items():
            found[f"{spec.split}.{name}.{part}".rstrip(".")] = float(number)
    return found


def _whole(metric: Any, kept: list[tuple[Tensor, Tensor]]) -> Any:
    if len(inspect.signature(metric).parameters) == 2:
        outputs, targets = zip(*kept, strict=True)
        return metric(torch.cat(outputs), torch.cat(targets))
    running = metric()
    for output, target in kept:
        running.update(output, target)
    return running.compute()
