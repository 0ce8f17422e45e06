"""Models in the forms of other programs: read again, they compute what the model computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from stratagem.common.base.errors import InvalidInputError, StratagemError, UnavailableError
from stratagem.common.job import JobSpec, load_job
from stratagem.tools.export import export as exported_program
from stratagem.tools.questions import answer
from stratagem.worker.models.build import build_model
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.jobs import ALLOW, job
from tests.repository import ROOT

CPU = torch.device("cpu")
KNOWN = [ALLOW, "examples.*:*"]


def written(spec: JobSpec, folder: Path, to: str, **asked: str) -> tuple[nn.Module, Path]:
    """The model with other weights than those of the seed, and what was written of it."""
    changed = spec.model_copy(update={"seed": 11})
    model = build_model(changed, EntryPoints(KNOWN), device=CPU, fresh=True).eval()
    state = folder / "state.safetensors"
    save_file({name: each.clone() for name, each in model.state_dict().items()}, state)
    export(spec, folder, to, **asked)
    return model, folder / "made"


def export(spec: JobSpec, folder: Path, to: str, **asked: str) -> None:
    request: dict[str, Any] = {
        "question": "export",
        "job_json": spec.canonical_json(),
        "allow": KNOWN,
        "import_path": [str(ROOT)],
        "device": "cpu",
        "state": str(folder / "state.safetensors"),
        "path": str(folder / "made"),
        "to": to,
        "shard_size": "5GB",
        **asked,
    }
    answer(request)


def gpt2() -> JobSpec:
    pytest.importorskip("transformers")
    return load_job(ROOT / "examples" / "interop" / "gpt2.yaml")


@pytest.mark.sweep
def test_a_model_of_transformers_is_loaded_by_from_pretrained(tmp_path: Path) -> None:
    model, folder = written(gpt2(), tmp_path, "hf", shard_size="40KB")
    from transformers import GPT2LMHeadModel

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert "lm_head.weight" not in index["weight_map"]
    assert len(index["weight_map"]) == 28
    assert json.loads((folder / "config.json").read_text())["model_type"] == "gpt2"
    loaded = GPT2LMHeadModel.from_pretrained(folder)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for name, each in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], each), name


def test_a_model_of_no_library_is_written_in_shards(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    model, folder = written(job("mlp"), tmp_path, "hf")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(model.state_dict())
        for name in file.keys():  # noqa: SIM118  (it is no mapping)
            assert torch.equal(file.get_tensor(name), model.state_dict()[name])


def test_a_program_of_torch_runs_with_any_number_of_rows(tmp_path: Path) -> None:
    model, path = written(job("mlp"), tmp_path, "torch-export")
    program = torch.export.load(path).module()
    x = torch.randn(9, next(model.parameters()).shape[1])
    assert torch.equal(program(x), model(x))


@pytest.mark.sweep
def test_a_program_of_gpt2_runs_with_any_number_of_rows(tmp_path: Path) -> None:
    model, path = written(gpt2(), tmp_path, "torch-export")
    program = torch.export.load(path).module()
    ids = torch.randint(64, (7, program_length(path)))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        assert torch.equal(program(**given).logits, model(**given).logits)


def program_length(path: Path) -> int:
    """The length of the sequences of the example, which the program keeps."""
    example = torch.export.load(path).example_inputs
    assert example is not None
    _, kwargs = example
    return int(kwargs["input_ids"].shape[1])


@pytest.mark.filterwarnings("default")  # torch's exporter uses what torch has deprecated
@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_onnx_runs_with_any_number_of_rows(tmp_path: Path, model: str) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    _, path = written(gpt2() if model == "gpt2" else job("mlp"), tmp_path, "onnx")
    (batch, *_) = onnx.load(str(path)).graph.input[0].type.tensor_type.shape.dim
    assert batch.dim_param


def test_what_is_missing_or_differs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(UnavailableError, match="pip install onnx onnxscript"):
        written(job("mlp"), tmp_path, "onnx")
    monkeypatch.setattr(exported_program, "_outputs", lambda model, _: [torch.rand(2)])
    with pytest.raises(StratagemError, match="differs from the model for 2 rows"):
        written(job("mlp"), tmp_path, "torch-export")


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    other = job({"entrypoint": "tests.userland.models:mlp", "kwargs": {"hidden": 5}})
    model = build_model(other, EntryPoints(KNOWN), device=CPU, fresh=True)
    save_file(dict(model.state_dict()), tmp_path / "state.safetensors")
    with pytest.raises(InvalidInputError, match="model: what is built here is not the model of"):
        export(job("mlp"), tmp_path, "hf")
