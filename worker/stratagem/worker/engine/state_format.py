"""Convert a trainer's state to named tensors and metadata, and back.

Names are `model/<state_dict name>` and `optimizer/<parameter name>/<key>`. Numbers that an
optimizer keeps as Python values are in the metadata under the same names. Loading copies into
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
"""Number of names that an error message lists."""
_CPU_KEYS: Final = frozenset({"step", "mu_product"})
NOTHING: Final[Mapping[str, Tensor]] = MappingProxyType({})

NamedParams = Sequence[tuple[str, nn.Parameter]]


def state_metadata(step: int, further: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the metadata of a state after `step` steps, extended by `further`."""
    return {"step": str(step), "format": _FORMAT, **(further or {})}


def step_of(metadata: Mapping[str, str]) -> int:
    """Return the number of steps of a state. Raises InvalidInputError for another format."""
    if metadata.get("format") != _FORMAT:
        raise InvalidInputError.at("state.format", f"{metadata.get('format')} is not supported")
    return int(metadata["step"])


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's live tensors; tied ones appear under each of their names."""
    return {f"{MODEL}{name}": tensor.detach() for name, tensor in model.state_dict().items()}


def optimizer_state(
    optimizer: torch.optim.Optimizer, params: NamedParams
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the optimizer's (tensors, metadata); mostly empty before the first step."""
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
                kind = f"keeps a {type(value).__name__} ({key!r} of {name!r})"
                raise InvalidInputError.at("optimizer", f"{kind}; it may keep tensors and numbers")
    return tensors, metadata


def is_one_number(name: str) -> bool:
    """Return whether the name is that of a scalar per parameter, such as a step count, and not of a
    tensor per element."""
    return name.rpartition("/")[2] in _CPU_KEYS


def load_model_state(model: nn.Module, tensors: Mapping[str, Tensor], where: str = "state") -> None:
    """Load the `model/…` tensors after checking names, shapes and dtypes; errors begin with
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
    """Return the `model/…` tensors of a state, or of a plain state_dict, for a model.

    Floating-point tensors are converted to the model's dtypes.
    """
    if not any(name.startswith(MODEL) for name in tensors):
        tensors = {f"{MODEL}{name}": tensor for name, tensor in tensors.items()}
    expected = model.state_dict()
    given = {}
    for name, tensor in tensors.items():
        target = expected.get(name.removeprefix(MODEL)) if name.startswith(MODEL) else None
        casts = target is not None and target.is_floating_point() and tensor.is_floating_point()
        given[name] = tensor.to(target.dtype) if target is not None and casts else tensor
    return given


def conversions_of(given: Mapping[str, str], model: nn.Module) -> str:
    """Return a sentence about the tensors that `given_model_state` converts; "" if none. given:
    dtypes such as "float16", keyed by name."""
    targets, conversions = model.state_dict(), dict[str, list[str]]()
    for full, dtype in sorted(given.items()):
        name = full.removeprefix(MODEL)
        target = targets.get(name)
        if target is None or not (target.is_floating_point() and "float" in dtype):
            continue
        wanted = str(target.dtype).removeprefix("torch.")
        if dtype != wanted:
            conversions.setdefault(f"{dtype} to {wanted}", []).append(name)
    parts = []
    for change, names in conversions.items():
        more = f" and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else ""
        parts.append(f"{', '.join(names[:_NUM_NAMES])}{more} from {change}")
    return f"is converted to the model's dtypes: {'; '.join(parts)}" if parts else ""


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    params: NamedParams,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Replace the optimizer's state by the given one, which may be empty."""
    param_of = dict(params)
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
        if name not in param_of:
            raise InvalidInputError.at(f"state.{full}", "belongs to no trainable parameter")
        if isinstance(value, str):
            loaded.setdefault(name, {})[key] = json.loads(value)
        else:
            # Torch keeps step counts on the CPU, but for fused kernels.
            is_beside = key in _CPU_KEYS and not fused[id(param_of[name])]
            device = "cpu" if is_beside else param_of[name].device
            copy = torch.empty_like(value, device=device).copy_(value)
            loaded.setdefault(name, {})[key] = copy
    optimizer.state.clear()
    for name, entries in loaded.items():
        optimizer.state[param_of[name]] = entries


def copied(
    tensors: Mapping[str, Tensor], into: Mapping[str, Tensor] = NOTHING
) -> dict[str, Tensor]:
    """Copy tensors to the CPU; names that share storage also share the copy. into: tensors that may
    be overwritten, and are used where they fit, since allocating memory costs several times as much
    as copying."""
    made: dict[tuple[Any, ...], Tensor] = {}
    addresses: set[int] = set()
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        moved()
        key = storage_key(tensor)
        if tensor.numel() == 0 or key not in made:
            old = into.get(name)
            if old is None or old.data_ptr() in addresses or not _fits(old, tensor):
                old = torch.empty_like(tensor, device="cpu")
            addresses.add(old.data_ptr())
            made[key] = old.copy_(tensor)
        result[name] = made[key]
    return result


def storage_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two tensors that are the same memory under two names."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _fits(old: Tensor, tensor: Tensor) -> bool:
    """Return whether the old tensor can hold a copy of this one."""
    is_alike = (old.dtype, old.shape, old.device.type) == (tensor.dtype, tensor.shape, "cpu")
    return is_alike and old.is_contiguous() and tensor.is_contiguous()


def fingerprint(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return a CRC32C over names, dtypes, shapes and bytes, sorted by name."""
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
    """Assign tensors to members for copying, about as many bytes to each; return the names per
    member.

    Tied tensors stay together. first_bytes: the bytes that the first member copies besides.
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
