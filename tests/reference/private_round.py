"""A private round as the documentation says it, in numpy: draw, clip, add, noise, divide."""

import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated

Change = dict[str, NDArray[Any]]


def norm_of(change: Change) -> float:
    return math.sqrt(math.fsum(float((c.astype(np.float64) ** 2).sum()) for c in change.values()))


def clipped(change: Change, length: float, norm: float, world: Mapping[str, Tensor]) -> Change:
    """Rounded to the types that are sent, and made shorter while that has made it too long."""
    factor, shorter = 1.0, 0.0
    while True:
        sent = {n: (c * factor).astype(world[n].numpy().dtype) for n, c in change.items()}
        if norm_of(sent) <= norm:
            return sent
        shorter = 2 * shorter or 2.0**-24
        factor = min(1.0, norm / length) * (1 - shorter)


def uniforms(seed: int, names: Sequence[str], num: int) -> NDArray[np.float64]:
    """Of the seeded noise that has these names: two in each row."""
    info = b"".join(len(n).to_bytes(8, "big") + n.encode() for n in names)
    secret = sha256(f"not private/{seed}".encode()).digest()
    key = HKDF(SHA256(), 32, b"stratagem noise", info).derive(secret)
    blocks = b"".join(index.to_bytes(16, "big") for index in range(num))
    stream = Cipher(algorithms.AES256(key), modes.ECB()).encryptor().update(blocks)
    bits = np.frombuffer(stream, "<u8").reshape(num, 2) >> np.uint64(11)
    return bits.astype(np.float64) / 2.0**53


def normals(pairs: NDArray[np.float64]) -> NDArray[np.float64]:
    first, second = pairs.T
    normal: NDArray[np.float64] = np.sqrt(-2 * np.log(1 - first)) * np.cos(2 * math.pi * second)
    return normal


def noised(
    total: NDArray[np.float64], sigma: float, noise: NDArray[np.float64]
) -> NDArray[np.float64]:
    grid = 2.0 ** (math.floor(math.log2(sigma)) - 20)
    return np.rint((total + sigma * noise) / grid) * grid


class PrivateRounds:
    """The clients and the mean of each round of a job whose noise is seeded."""

    def __init__(self, job: JobSpec) -> None:
        assert job.privacy is not None
        assert job.privacy.noise_multiplier is not None
        assert isinstance(job.strategy, Federated)
        self.spec, self.seed, self.num_clients = job.privacy, job.seed, job.strategy.num_clients
        self.rate = getattr(job.strategy.client_selection, "fraction", 1.0)
        self.num_expected = self.rate * self.num_clients
        self.norms = [job.privacy.clip.norm]
        self.z, self.answer_noise = job.privacy.noise_multiplier, 0.0
        if job.privacy.clip.adaptive is not None:
            self.answer_noise = self.num_expected / 20
            self.z = (self.z**-2 - (2 * self.answer_noise) ** -2) ** -0.5

    def uniforms(self, what: str, round_num: int, name: str, num: int) -> NDArray[np.float64]:
        names = [what, str(round_num), name] if name else [what, str(round_num)]
        return uniforms(self.seed, names, num)

    def normal(self, what: str, round_num: int, name: str, num: int) -> NDArray[np.float64]:
        return normals(self.uniforms(what, round_num, name, num))

    def clients_of(self, round_num: int) -> list[int]:
        drawn = self.uniforms("draw", round_num, "", self.num_clients)[:, 0]
        return [client for client in range(self.num_clients) if drawn[client] < self.rate]

    def noised(
        self, total: NDArray[np.float64], sigma: float, noise: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        return noised(total, sigma, noise) / self.num_expected

    def means(
        self, round_num: int, world: Mapping[str, Tensor], states: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The next state in float64; notes the clipping norm of the round after."""
        norm = self.norms[-1]
        floats = [name for name, tensor in world.items() if tensor.is_floating_point()]
        changes = [{n: (s[n].double() - world[n].double()).numpy() for n in floats} for s in states]
        lengths = [norm_of(change) for change in changes]
        sent = [clipped(c, n, norm, world) for c, n in zip(changes, lengths, strict=True)]
        means = dict(world)
        for name in floats:
            total = sum((c[name].astype(np.float64) for c in sent), np.zeros(world[name].shape))
            noise = self.normal("sum", round_num, f"model/{name}", total.size).reshape(total.shape)
            moved = self.noised(np.asarray(total), self.z * norm, noise)
            means[name] = world[name].double() + torch.from_numpy(np.asarray(moved))
        if self.spec.clip.adaptive is not None:
            num_within = np.array([sum(length <= norm for length in lengths)], np.float64)
            noise = self.normal("answers", round_num, "", 1)
            share = self.noised(num_within, self.answer_noise, noise)[0]
            how = self.spec.clip.adaptive
            norm *= math.exp(-how.rate * (share - how.quantile))
        self.norms.append(norm)
        return means
