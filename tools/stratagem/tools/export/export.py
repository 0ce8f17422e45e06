"""Export a run's model in the forms of other programs: Hugging Face, torch.export, or ONNX.

The user's code builds the model, which is filled with a committed state.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_only

from stratagem.common.base.errors import InvalidInputError, StratagemError, UnavailableError, led_to
from stratagem.common.job import JobSpec
from stratagem.common.job.fields import RETURNED
from stratagem.tools.memory.play import Site
from stratagem.worker.data.datasets import Gather
from stratagem.worker.models.build import build_model
from stratagem.worker.models.tensors import rows_dtype

# ---- Hugging Face folder ----
#
# `from_pretrained` loads the folder: shards, their index, and the model's config.

_NO_HUB = "--to hf writes shards with huggingface_hub; pip install huggingface_hub"


def write_hf_folder(model: nn.Module, folder: Path, shard_size: str) -> None:
    """Write the model as its own library saves it; without a library, as shards with an index. Tied
    tensors are written once. shard_size: such as "5GB". A model of peft writes its adapter."""
    save: Any = getattr(model, "save_pretrained", None)
    try:
        if callable(save):
            known = inspect.signature(save).parameters
            sizes = {"max_shard_size": shard_size} if "max_shard_size" in known else {}
            save(str(folder), **sizes)
            return
        try:
            from huggingface_hub import save_torch_state_dict
        except ImportError:
            raise UnavailableError(_NO_HUB) from None
        folder.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(model.state_dict(), folder, max_shard_size=shard_size)
    except ValueError as error:
        raise InvalidInputError.at("--shard-size", str(error)) from error


# ---- Trained model ----

_LABELS: Final = ("label", "labels")
NUM_ROWS: Final = 3
"""The number of rows of an example input; exporters treat sizes of 0 and 1 as fixed."""


def trained_model(job: JobSpec, site: Site, state: Path) -> nn.Module:
    """Build the model on the CPU and load a state into it. state: a file with all names of the
    model's state_dict(). Raises InvalidInputError for the state of a different model."""
    model = build_model(job, site.entrypoints, device=torch.device("cpu"), fresh=True)
    try:
        model.load_state_dict(load_file(state), strict=True)
    except RuntimeError as error:
        text = f"what is built here is not the model of the run: {error}"
        raise InvalidInputError.at("model", text) from None
    return model.eval()


Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments of one call of a model."""


def example_inputs(job: JobSpec, site: Site, model: nn.Module) -> Inputs:
    """Return the model's arguments for some rows of the job's data, without labels."""
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
    """Return the inputs cut or extended to num_rows rows; existing rows are repeated in turn."""
    return tree_map_only(Tensor, lambda t: t[torch.arange(num_rows) % len(t)].contiguous(), inputs)


# ---- Exported program ----
#
# The number of rows is free. The written file is read again, run with two numbers of rows, and
# compared with the model.

_BATCH: Final = "batch"
_TRIED_ROWS: Final = (2, 5)
_RELATIVE, _ABSOLUTE = 1e-4, 1e-5
"""The relative and absolute tolerance between results of kernels that add in different orders."""
NO_ONNX: Final = "--to onnx needs onnx and onnxscript here; pip install onnx onnxscript"

Outputs = Sequence[Tensor]


def without_cache(model: nn.Module) -> None:
    """Have a transformers model return no key-value cache, which is not a tensor."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", None):
        config.use_cache = False


def write_program(model: nn.Module, inputs: Inputs, path: Path) -> float:
    """Export the model by torch.export to a file; return the largest difference of an output.
    `torch.export.load(path).module()` is the model, without its code."""
    args, kwargs = inputs
    program = _exporting(
        lambda: torch.export.export(model, args, kwargs, dynamic_shapes=_free_rows(model, inputs))
    )
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    return _compared(model, inputs, lambda given: _outputs(loaded, given))


def sizes_of(model: nn.Module, inputs: Inputs) -> list[str]:
    """Describe the inputs of the exported program, such as "x float32[rows, 64]": all sizes but the
    first are fixed to those of the example."""
    args, kwargs = inputs
    named = {**_by_name(model, args), **kwargs}
    paths = tree_flatten_with_path(named)[0]
    return [
        f"{'.'.join(map(_key_text, path))} {_shape_text(leaf)}"
        for path, leaf in paths
        if isinstance(leaf, Tensor)
    ]


def _key_text(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "idx", key)))


def _shape_text(tensor: Tensor) -> str:
    sizes = ", ".join(["rows", *map(str, tensor.shape[1:])])
    return f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}]"


def write_onnx(model: nn.Module, inputs: Inputs, path: Path) -> float:
    """Export the model as ONNX; return the largest difference of an output, run by onnxruntime, or
    else by onnx's own evaluator."""
    try:
        import onnx
        import onnxscript  # noqa: F401  (torch asks for it)
    except ImportError:
        raise UnavailableError(NO_ONNX) from None
    args, kwargs = inputs
    program = _exporting(
        lambda: torch.onnx.export(
            model,
            args,
            kwargs=kwargs,
            dynamo=True,
            dynamic_shapes=_free_rows(model, inputs),
            verbose=False,
        )
    )
    assert program is not None
    program.save(str(path))
    run = _onnx_runner(path)
    names = [each.name for each in onnx.load(str(path), load_external_data=False).graph.input]

    def outputs(given: Inputs) -> Outputs:
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        arrays = {name: t.numpy() for name, t in zip(names, tensors, strict=True)}
        return [torch.as_tensor(found) for found in run(arrays)]

    return _compared(model, inputs, outputs)


def _onnx_runner(path: Path) -> Callable[[dict[str, Any]], Sequence[Any]]:
    try:
        import onnxruntime
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(str(path))
        return lambda arrays: evaluator.run(None, arrays)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda arrays: session.run(None, arrays)


def _free_rows(model: nn.Module, inputs: Inputs) -> Any:
    """Return every tensor argument's first size, marked as free (dynamic), by argument name."""
    rows = torch.export.Dim(_BATCH)
    args, kwargs = tree_map_only(Tensor, lambda _: {0: rows}, inputs)
    return tuple(args) if not kwargs else {**_by_name(model, args), **kwargs}


def _by_name(model: nn.Module, args: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(inspect.signature(model.forward).parameters, args, strict=False))


def _exporting(export: Callable[[], Any]) -> Any:
    try:
        return export()
    except Exception as error:  # any error of the exporter or the model
        *_, cause = led_to(error, by_handling=False)
        first = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise StratagemError(f"the model cannot be exported: {first}") from error


def _compared(model: nn.Module, inputs: Inputs, run: Callable[[Inputs], Outputs]) -> float:
    """Return the largest difference between the outputs of the model and of the exported one, which
    `run` calls. Raises StratagemError if it is more than rounding."""
    largest = 0.0
    for num_rows in _TRIED_ROWS:
        given = resized(inputs, num_rows)
        with torch.no_grad():
            expected, found = _outputs(model, given), run(given)
        for ours, theirs in zip(expected, found, strict=True):
            if ours.is_floating_point():
                largest = max(largest, float((ours - theirs).abs().max()))
            if ours.shape != theirs.shape or not torch.allclose(
                ours, theirs, rtol=_RELATIVE, atol=_ABSOLUTE
            ):
                text = f"what was written differs from the model for {num_rows} rows, by {largest}"
                raise StratagemError(text)
    return largest


def _outputs(model: Callable[..., Any], inputs: Inputs) -> Outputs:
    args, kwargs = inputs
    return [leaf for leaf in tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)]
