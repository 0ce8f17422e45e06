"""Convert torch tensors to and from a tensor stream.

The conversion between `torch.Tensor` and bytes makes no copy of the whole. This is the only module
of `common` that imports torch.

Received bytes are copied into storage that torch allocated, one storage per tensor: the bits of a
matrix product change with the alignment of its operands, so a view of a receive buffer is not used.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.tensors.files import from_file, read_header
from stratagem.common.tensors.manifest import (
    DTYPES,
    DTypeInfo,
    Manifest,
    Purpose,
    build_manifest,
    dtype_named,
)
from stratagem.common.tensors.stream import Data, Sink

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    dtype.name: getattr(torch, dtype.name) for dtype in DTYPES if hasattr(torch, dtype.name)
}


def manifest_of(
    named: Mapping[str, Tensor],
    purpose: Purpose,
    *,
    weight: float = 0.0,
    metadata: Mapping[str, str] | None = None,
) -> tuple[Manifest, list[memoryview]]:
    """Return the manifest of tensors, and their bytes as one buffer per stored tensor.

    Tensors are ordered by element size, largest first, and otherwise as given, so each one is
    aligned in a file, as readers of safetensors expect. Tensors that are the same view of the same
    storage are sent once. The buffers are the tensors' own memory where these are contiguous and on
    the CPU: the caller must not change them while they are sent.
    """
    ordered = sorted(named.items(), key=lambda item: -element_type(*item).item_bytes)
    seen: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    buffers: list[memoryview] = []
    for name, tensor in ordered:
        # Two tensors without elements share nothing that could be tied.
        key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
            continue
        seen[key] = name
        buffers.append(bytes_of(tensor))
    manifest = build_manifest(
        ((name, element_type(name, value).name, tuple(value.shape)) for name, value in ordered),
        purpose,
        aliases=aliases,
        weight=weight,
        metadata=metadata,
    )
    return manifest, buffers


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in C order; a view if it is contiguous and on the CPU."""
    if tensor.numel() == 0:
        return memoryview(b"")
    whole = tensor.detach().resolve_neg().cpu().contiguous()
    # view(-1) would keep the stride of a tensor of one element, which is contiguous with any.
    flat = whole.as_strided((whole.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def allocate(manifest: Manifest) -> tuple[Sink, Callable[[], dict[str, Tensor]]]:
    """Allocate the tensors of a checked manifest; return a sink for its byte range, and a function
    that returns them. Each byte is written once, straight into the tensor that it belongs to."""
    stored = {
        spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        for spec in manifest.stored()
    }

    def finish() -> dict[str, Tensor]:
        return {tensor.name: stored[tensor.alias_of or tensor.name] for tensor in manifest.tensors}

    return _scatter(manifest, stored), finish


def _scatter(manifest: Manifest, stored: Mapping[str, Tensor]) -> Sink:
    specs = [spec for spec in manifest.stored() if spec.size_bytes]
    starts = [spec.offset for spec in specs]
    views = [bytes_of(stored[spec.name]) for spec in specs]

    def write(offset: int, data: Data) -> None:
        index = bisect_right(starts, offset) - 1
        rest = memoryview(data)
        while rest:
            start = offset - starts[index]
            size = min(len(views[index]) - start, len(rest))
            views[index][start : start + size] = rest[:size]
            rest = rest[size:]
            offset += size
            index += 1

    return write


def load_file(path: Path) -> tuple[dict[str, Tensor], Manifest]:
    """Load a safetensors file's tensors, tied tensors as one; the caller checks the digest."""
    manifest, data_start = read_header(path)
    sink, finish = allocate(manifest)
    offset = 0
    for piece in from_file(path, data_start, manifest.total_bytes)(0):
        sink(offset, piece)
        offset += len(piece)
    return finish(), manifest


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of this name. Raises InvalidInputError if this torch lacks it."""
    if name not in TORCH_DTYPES:
        dtype_named(name)  # raises when no torch has it
        raise InvalidInputError.at("dtype", f"{name} is not in torch {torch.__version__}")
    return TORCH_DTYPES[name]


def dtype_of(tensor: Tensor) -> str:
    """Return the name of a tensor's element type in manifests."""
    return element_type("tensor", tensor).name


def element_type(field: str, tensor: Tensor) -> DTypeInfo:
    """Return a tensor's element type. Raises InvalidInputError at `field` if it is unsupported."""
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        text = f"is a tensor of layout {layout}; allowed is strided, which `to_dense()` makes"
        raise InvalidInputError.at(field, text)
    if tensor.is_meta:
        raise InvalidInputError.at(field, "is a tensor on the meta device, which has no values")
    return dtype_named(str(tensor.dtype).removeprefix("torch."), field)
