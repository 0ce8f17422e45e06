"""A run's model, built here by the user's code and filled with a committed state."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.job.fields import RETURNED
from stratagem.tools.planning.job_site import Site
from stratagem.worker.data.datasets import Gather
from stratagem.worker.models.build import build_model
from stratagem.worker.models.tensors import rows_dtype

_LABELS: Final = ("label", "labels")
NUM_ROWS: Final = 3
"""Of an example; exporters take sizes of 0 and 1 for fixed ones."""


def trained_model(job: JobSpec, site: Site, state: Path) -> nn.Module:
    """Build the model on the CPU, ready to be run. state: a file of all its state_dict()'s names.

    Raises InvalidInputError for a state of another model than the one that is built here.
    """
    model = build_model(job, site.entrypoints, device=torch.device("cpu"), fresh=True)
    try:
        model.load_state_dict(load_file(state), strict=True)
    except RuntimeError as error:
        text = f"what is built here is not the model of the run: {error}"
        raise InvalidInputError.at("model", text) from None
    return model.eval()


Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a model."""


def example_inputs(job: JobSpec, site: Site, model: nn.Module) -> Inputs:
    """Return the arguments of the model for some rows of the job's data, without labels."""
    data = site.data_of(job)
    split = next((name for name, rows in data.items() if len(rows)), None)
    if split is None:
        raise InvalidInputError.at("data", "has no rows, of which the model's input is an example")
    num_rows = min(NUM_ROWS, len(data[split]))
    gather = Gather(rows_dtype(job, model), torch.device("cpu"))
    x, _ = gather(data[split], torch.arange(num_rows), f"reading {split}")
    x = resized(x, NUM_ROWS)
    takes_names = job.loss is None or job.loss.name == RETURNED
    if takes_names and isinstance(x, Mapping):
        return (), {name: item for name, item in x.items() if name not in _LABELS}
    return (x,), {}


def resized(inputs: Any, num_rows: int) -> Any:
    """Return inputs with as many rows, in turn from those that there are."""
    return tree_map_only(Tensor, lambda t: t[torch.arange(num_rows) % len(t)].contiguous(), inputs)
