"""Convert a trainer's state to named tensors and metadata, and back.

Names are `model/<state_dict name>` and `optimizer/<parameter name>/<key>`. Numbers that an
optimizer keeps as Python values stand in the metadata under the same names. Loading copies into
storage that torch allocated. The module knows neither files nor streams.
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import google_crc32c
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.host.stalls import moved

# ---- State format ----

MODEL: Final = "model/"
OPTIMIZER: Final = "optimizer/"
_FORMAT: Final = "1"
_CRC_BYTES: Final = 1 << 20
_NUM_NAMES: Final = 5
"""The number of names that a sentence lists."""
_CPU_KEYS: Final = frozenset({"step", "mu_product"})
NOTHING: Final[Mapping[str, Tensor]] = MappingProxyType({})

NamedParams = Sequence[tuple[str, nn.Parameter]]


def state_metadata(step: int, further: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the metadata of a state after `step` steps: these, then the further ones given."""
    return {"step": str(step), "format": _FORMAT, **(further or {})}


def step_of(metadata: Mapping[str, str]) -> int:
    """Return after how many steps a state was taken; InvalidInputError if it is of another
    format."""
    if metadata.get("format") != _FORMAT:
        raise InvalidInputError.at("state.format", f"{metadata.get('format')} is not supported")
    return int(metadata["step"])


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """The live tensors; tied ones stand under each of their names."""
    return {f"{MODEL}{name}": tensor.detach() for name, tensor in model.state_dict().items()}


def optimizer_state(
    optimizer: torch.optim.Optimizer, params: NamedParams
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata); empty before the first step for most optimizers."""
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name, param in params:
        for key, value in optimizer.state.get(param, {}).items():
            full = f"{OPTIMIZER}{name}/{key}"
            if isinstance(value, Tensor):
                tensors[full] = value.detach()
            elif isinstance(value, int | float):
                metadata[full] = json.dumps(value)
            elif value is not None:
                kept = f"keeps a {type(value).__name__} ({key!r} of {name!r})"
                raise InvalidInputError.at("optimizer", f"{kept}; it may keep tensors and numbers")
    return tensors, metadata


def is_one_number(name: str) -> bool:
    """Return whether a tensor of this name is one number that an optimizer keeps of a parameter,
    and not one of each element."""
    return name.rpartition("/")[2] in _CPU_KEYS


def load_model_state(model: nn.Module, tensors: Mapping[str, Tensor], where: str = "state") -> None:
    """Copy `model/…` tensors in, after checking names, shapes and dtypes; errors begin with
    `where`."""
    given = {n.removeprefix(MODEL): t for n, t in tensors.items() if n.startswith(MODEL)}
    expected = model.state_dict()
    missing, unexpected = sorted(expected.keys() - given), sorted(given.keys() - expected.keys())
    if missing or unexpected:
        raise InvalidInputError.at(
            where, f"missing tensors: {missing or 'none'}; unexpected: {unexpected or 'none'}"
        )
    for name, target in expected.items():
        source = given[name]
        if source.shape != target.shape or source.dtype != target.dtype:
            raise InvalidInputError.at(
                f"{where}.{name}",
                f"is {source.dtype} {tuple(source.shape)}, "
                f"but the model has {target.dtype} {tuple(target.shape)}",
            )
    model.load_state_dict(given, strict=True)


def given_model_state(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """`model/…` tensors for a model out of a state, or out of a plain state_dict.

    Floating-point numbers get the dtype that the model has.
    """
    if not any(name.startswith(MODEL) for name in tensors):
        tensors = {f"{MODEL}{name}": tensor for name, tensor in tensors.items()}
    expected = model.state_dict()
    given = {}
    for name, tensor in tensors.items():
        own = expected.get(name.removeprefix(MODEL)) if name.startswith(MODEL) else None
        casts = own is not None and own.is_floating_point() and tensor.is_floating_point()
        given[name] = tensor.to(own.dtype) if own is not None and casts else tensor
    return given


def conversions_of(given: Mapping[str, str], model: nn.Module) -> str:
    """Return which tensors `given_model_state` converts, as a sentence; "" if none.

    given: the dtypes by name, as "float16"; the names as there.
    """
    own, found = model.state_dict(), dict[str, list[str]]()
    for full, dtype in sorted(given.items()):
        name = full.removeprefix(MODEL)
        target = own.get(name)
        if target is None or not (target.is_floating_point() and "float" in dtype):
            continue
        wanted = str(target.dtype).removeprefix("torch.")
        if dtype != wanted:
            found.setdefault(f"{dtype} to {wanted}", []).append(name)
    parts = []
    for change, names in found.items():
        more = f" and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else ""
        parts.append(f"{', '.join(names[:_NUM_NAMES])}{more} from {change}")
    return f"is converted to the model's dtypes: {'; '.join(parts)}" if parts else ""


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    params: NamedParams,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Replace the optimizer's state by what is given, which may be nothing."""
    known = dict(params)
    fused = {
        id(param): bool(group.get("fused"))
        for group in optimizer.param_groups
        for param in group["params"]
    }
    loaded: dict[str, dict[str, Any]] = {}
    given: dict[str, Tensor | str] = {**tensors, **metadata}
    for full, value in given.items():
        if not full.startswith(OPTIMIZER):
            continue
        name, _, key = full.removeprefix(OPTIMIZER).rpartition("/")
        if name not in known:
            raise InvalidInputError.at(f"state.{full}", "belongs to no trainable parameter")
        if isinstance(value, str):
            loaded.setdefault(name, {})[key] = json.loads(value)
        else:
            # Torch keeps step counts on the CPU, but for fused kernels.
            is_beside = key in _CPU_KEYS and not fused[id(known[name])]
            device = "cpu" if is_beside else known[name].device
            copy = torch.empty_like(value, device=device).copy_(value)
            loaded.setdefault(name, {})[key] = copy
    optimizer.state.clear()
    for name, entries in loaded.items():
        optimizer.state[known[name]] = entries


def copied(
    tensors: Mapping[str, Tensor], into: Mapping[str, Tensor] = NOTHING
) -> dict[str, Tensor]:
    """Copy on the CPU; names that shared storage share it again.

    into: tensors that nobody needs any more, which become the copies where they fit: memory that is
    new to the process costs several times as long as the copy.
    """
    made: dict[tuple[Any, ...], Tensor] = {}
    taken: set[int] = set()
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        moved()
        key = storage_key(tensor)
        if tensor.numel() == 0 or key not in made:
            old = into.get(name)
            if old is None or old.data_ptr() in taken or not _fits(old, tensor):
                old = torch.empty_like(tensor, device="cpu")
            taken.add(old.data_ptr())
            made[key] = old.copy_(tensor)
        result[name] = made[key]
    return result


def storage_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return what two tensors have in common that are one under two names."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _fits(old: Tensor, tensor: Tensor) -> bool:
    """Return whether a copy of the tensor would be made as this one is."""
    is_alike = (old.dtype, old.shape, old.device.type) == (tensor.dtype, tensor.shape, "cpu")
    return is_alike and old.is_contiguous() and tensor.is_contiguous()


def fingerprint(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """CRC32C over names, dtypes, shapes and bytes in order of name: equal states, equal words."""
    crc = google_crc32c.extend(0, json.dumps(dict(sorted(metadata.items()))).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        head = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        crc = google_crc32c.extend(crc, head.encode())
        if tensor.numel():
            flat = tensor.reshape(-1).view(torch.uint8).numpy()
            for start in range(0, flat.size, _CRC_BYTES):
                moved()
                crc = google_crc32c.extend(crc, flat[start : start + _CRC_BYTES])
    return f"{crc:08x}"


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    """32 bits over names, dtypes, shapes and two sums of each tensor, at memory speed.

    Equal states give equal numbers on machines of equal numerics; states that differ by accident
    give different ones, but a collision can be constructed on purpose.
    """
    lines = [json.dumps(dict(sorted(metadata.items())))]
    for name, tensor in sorted(tensors.items()):
        live = tensor.detach()
        if live.is_floating_point():
            length = torch.linalg.vector_norm(live.reshape(-1), dtype=torch.float64)
            sums = [float(live.sum(dtype=torch.float64)).hex(), float(length).hex()]
        else:
            sums = [str(int(live.sum(dtype=torch.int64)))]
        lines.append(f"{name} {live.dtype} {tuple(live.shape)} {' '.join(sums)}")
    return int(google_crc32c.extend(0, "\n".join(lines).encode()))


# ---- Division of tensors among members ----
#
# All members of a party hold these tensors alike, and each copies some of them for a commit. The
# division depends on names and sizes alone, so all members compute the same one without a message.


def dealt_out(
    tensors: Mapping[str, Tensor], num_members: int, first_bytes: int
) -> list[frozenset[str]]:
    """Return by member which of these tensors it copies: about as many bytes for each, the largest
    ones first. Those that are one tensor under several names stay together.

    first_bytes: what the first member copies beside.
    """
    alike: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        key = storage_key(tensor) if tensor.numel() else name
        alike.setdefault(key, []).append(name)
    groups = sorted(alike.values(), key=lambda names: -tensors[names[0]].nbytes)
    loads, shares = (
        [first_bytes] + [0] * (num_members - 1),
        [set[str]() for _ in range(num_members)],
    )
    for names in groups:
        member = loads.index(min(loads))
        loads[member] += tensors[names[0]].nbytes
        shares[member].update(names)
    return [frozenset(share) for share in shares]
