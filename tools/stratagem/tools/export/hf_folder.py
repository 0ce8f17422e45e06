"""A model as a folder that `from_pretrained` loads: shards, their index, and the model's config."""

import inspect
from pathlib import Path
from typing import Any

from torch import nn

from stratagem.common.base.errors import InvalidInputError, UnavailableError

_NO_HUB = "--to hf writes shards with huggingface_hub; pip install huggingface_hub"


def write_hf_folder(model: nn.Module, folder: Path, shard_size: str) -> None:
    """Write the model as its library saves it; one of no library as shards with an index.

    Tied tensors are written once. shard_size: such as "5GB". A model of peft writes its adapter.
    """
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
