"""AccountRound draws the clients of a private round in secret and computes what the round will
cost.

The fold of such a round takes its secret, its noise and the next clipping norm from here.
"""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Digest
from stratagem.common.job import JobSpec, PrivacySpec
from stratagem.common.job.privacy import too_few
from stratagem.common.privacy import accountant, adaptive_clipping
from stratagem.common.privacy.noise import (
    Floats,
    SecretLostError,
    derived_key,
    fingerprint_of,
    rounded_to_grid,
    seeded_secret,
    standard_normal,
    uniform,
)
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.files import parse_header
from stratagem.common.tensors.manifest import WITHIN_NORM, Manifest, dtype_named
from stratagem.coordinator.core.effects import AccountRound, AggregateRound
from stratagem.coordinator.core.facts import RoundAccounted, RunFailed
from stratagem.coordinator.effects.context import LiveRuns
from stratagem.coordinator.strategies.federated.run import spec_of
from stratagem.coordinator.updates.floats import Raw, Wide, widen
from stratagem.coordinator.updates.reading import Source, StateReader
from stratagem.coordinator.updates.upload import SpoolEntry

# ---- Noise ----
#
# The noise of one private round covers the draw of its clients and the values that they send:
#
#     sum     = Σ clip(Δ_k) + N(0, sum_noise²), rounded to a grid      (for each element)
#     mean    = sum / expected number of clients
#     answers = Σ b_k + N(0, answer_noise²), over that number          (who was within the norm)
#
# All noise is derived from the secret, the name of the round and that of the tensor. The name of
# the round is that of its folder in the spool, which no other round has: neither one of another
# run of the same id, nor the same round after the run has gone back to an earlier commit.

FROZEN_KEY: Final = "frozen"
"""Metadata key of a private run's state: the names of its frozen parameters, as JSON."""


def drawn_clients(
    secret: bytes, round_name: str, candidates: Sequence[int], rate: float
) -> tuple[int, ...]:
    """Return the clients drawn for a round: each independently with this probability."""
    key = derived_key(secret, ["draw", round_name])
    return tuple(c for c in candidates if rate == 1.0 or uniform(key, c, 1)[0] < rate)


def noised_share(
    secret: bytes, round_name: str, num_within: int, answer_noise: float, num_expected: float
) -> float:
    """Return the share of clients whose change was within the clipping norm, with noise added."""
    key = derived_key(secret, ["answers", round_name])
    noise = answer_noise * float(standard_normal(key, 0, 1)[0])
    return float(rounded_to_grid(np.array([num_within + noise]), answer_noise)[0]) / num_expected


class TensorNoise:
    """The noise of a private round per element of a model, addressed by offset in its data.

    Frozen parameters have no noise: no client changes them, whatever its rows are.
    """

    def __init__(self, secret: bytes, round_name: str, manifest: Manifest) -> None:
        self._secret, self._round_name = secret, round_name
        self._specs = [spec for spec in manifest.stored() if spec.size_bytes]
        self._frozen = frozenset(json.loads(manifest.metadata.get(FROZEN_KEY, "[]")))
        self._ends = np.array([spec.offset + spec.size_bytes for spec in self._specs])

    def read(self, dtype: str, offset: int, num: int) -> Floats:
        """Return standard normal noise for num elements from a byte offset on; NaN for frozen
        parameters."""
        item_bytes = dtype_named(dtype).item_bytes
        noise = np.empty(num)
        index, done = int(np.searchsorted(self._ends, offset, side="right")), 0
        while done < num:
            spec = self._specs[index]
            first = 0 if done else (offset - spec.offset) // item_bytes
            here = min(num - done, spec.size_bytes // item_bytes - first)
            if spec.name in self._frozen:
                noise[done : done + here] = math.nan
            else:
                key = derived_key(self._secret, ["sum", self._round_name, spec.name])
                noise[done : done + here] = standard_normal(key, first, here)
            done, index = done + here, index + 1
        return noise


# ---- Mean ----
#
# The noised sum of the changes, on the base of the round, is computed window by window.
#
# In an update, floating tensors hold the client's clipped change. Each change counts 1, and there
# may be none. Integers and bools are those of the base: what clients make of them, such as a
# count of batches, is not published.

_WINDOW_ELEMENTS: Final = 1 << 18


class PrivateMean:
    """A fold rule for private rounds: adds the noised mean change to the base state."""

    def __init__(self, noise: TensorNoise, of_round: RoundAccounted, base: StateReader) -> None:
        self._noise, self._base = noise, base
        self._sigma, self._num_expected = of_round.sum_noise, of_round.num_expected
        self.window_elements = _WINDOW_ELEMENTS

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        """Fill `out` with the next state from that byte offset on; `raw` is scratch."""
        out[:] = 0.0
        change = np.empty(out.size)
        for source in sources:
            source.read(offset, raw)
            widen(dtype, raw, change)
            out += change
        noise = self._noise.read(dtype, offset, out.size)
        out += self._sigma * noise
        out[:] = rounded_to_grid(out, self._sigma)
        out[np.isnan(noise)] = 0.0  # whatever clients send for frozen parameters
        out /= self._num_expected
        raw[:] = self._base.read_raw(dtype, offset, raw.size)
        widen(dtype, raw, change)
        out += change

    def integers(self, sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        """Fill `out` with the integers or bools of the base; updates need not agree on them."""
        for source in sources:
            source.read(offset, out)
        out[:] = self._base.read_raw(dtype, offset, out.size)
        return ""


# ---- AccountRound ----


async def account_round(runs: LiveRuns, effect: AccountRound) -> None:
    """Account the privacy of the next round; report RoundAccounted, or the end of a run that cannot
    be accounted."""
    try:
        fact: RoundAccounted | RunFailed = await asyncio.to_thread(_accounted, runs, effect)
    except (SecretLostError, InvalidInputError) as error:
        fact = RunFailed(reason=f"round {effect.round_num}: {error}")
    except ModuleNotFoundError:
        fact = RunFailed(reason=f"privacy: this coordinator {accountant.NEEDED}")
    failpoint("coordinator.privacy.accounted")
    await runs.report(effect.run_id, fact)
    rounds = spec_of(runs.job_of(effect.run_id, effect.party)).rounds
    if isinstance(fact, RoundAccounted) and effect.round_num < rounds:
        runs.chores.do(_ahead(effect, fact), f"account round {effect.round_num + 1}")


async def _ahead(effect: AccountRound, fact: RoundAccounted) -> None:
    """Precompute the privacy cost of the following round while this one trains, for the
    accountant's cache."""
    costs = (effect.num_spent + 2, fact.noise_multiplier, fact.sampling_rate, fact.delta)
    await asyncio.to_thread(accountant.epsilon_after, *costs)


@dataclass(frozen=True, slots=True)
class PrivateRound:
    """The noise for the fold of one private round: the secret it derives from, and the scales."""

    secret: bytes
    name: str
    """The unique name of the round, by which its folder in the spool is named, too."""
    accounted: RoundAccounted

    @classmethod
    def of(cls, runs: LiveRuns, effect: AggregateRound, accounted: RoundAccounted) -> Self:
        """Return the noise for the fold of the effect's round. Raises SecretLostError."""
        secret, name = _secret(runs, effect, accounted.fingerprint)
        return cls(secret, name, accounted)

    def mean(self, manifest: Manifest, base: StateReader) -> PrivateMean:
        """Return the fold rule that adds the noised mean change to this base state."""
        return PrivateMean(TensorNoise(self.secret, self.name, manifest), self.accounted, base)

    def next_norm(self, job: JobSpec, entries: Sequence[SpoolEntry]) -> float:
        """Return the next clipping norm, adapted to the share of clients below the present norm."""
        norm, noise = self.accounted.clip_norm, self.accounted.answer_noise
        adaptive = job.privacy and job.privacy.clip.adaptive
        if not adaptive:
            return norm
        num_within, num_expected = sum(map(_is_within, entries)), self.accounted.num_expected
        share = noised_share(self.secret, self.name, num_within, noise, num_expected)
        return adaptive_clipping.next_norm(norm, share, adaptive.quantile, adaptive.rate)


def _is_within(entry: SpoolEntry) -> bool:
    """Return True if the client's update says that its change was not clipped."""
    with entry.path.open("rb") as file:
        manifest, _ = parse_header(file, Digest(entry.path.name))
    return manifest.metadata.get(WITHIN_NORM) == "1"


def _accounted(runs: LiveRuns, effect: AccountRound) -> RoundAccounted:
    """Return the privacy account of the next round; call this in a thread. Raises SecretLostError,
    and InvalidInputError if the job's target or adaptive clipping is out of reach."""
    job = runs.job_of(effect.run_id, effect.party)
    spec, strategy = job.privacy, spec_of(job)
    assert spec is not None
    secret, name = _secret(runs, effect, effect.fingerprint)
    rate, delta = spec.sampling_rate(strategy), spec.target.delta
    noise = effect.noise_multiplier or _calibrated(spec, rate, strategy.rounds)
    num_expected = rate * len(effect.candidates)
    sum_noise, answer_noise = _shares(spec, noise, num_expected)
    return RoundAccounted(
        party=effect.party,
        round_num=effect.round_num,
        drawn=drawn_clients(secret, name, effect.candidates, rate),
        sampling_rate=rate,
        num_expected=num_expected,
        clip_norm=effect.clip_norm,
        noise_multiplier=noise,
        sum_noise=sum_noise * effect.clip_norm,
        answer_noise=answer_noise,
        epsilon=accountant.epsilon_after(effect.num_spent + 1, noise, rate, delta),
        delta=delta,
        accountant=accountant.accountant_version(),
        fingerprint=fingerprint_of(secret),
    )


def _calibrated(spec: PrivacySpec, rate: float, num_rounds: int) -> float:
    assert spec.target.epsilon is not None, "the job was checked"
    return accountant.calibrated_noise(spec.target.epsilon, spec.target.delta, num_rounds, rate)


def _shares(spec: PrivacySpec, noise: float, num_expected: float) -> tuple[float, float]:
    """Return the noise multipliers for the changes, relative to the clipping norm, and for the
    clients' answers about clipping."""
    if spec.clip.adaptive is None:
        return noise, 0.0
    of_sum = adaptive_clipping.sum_noise_multiplier(noise, num_expected)
    if of_sum is None:
        raise InvalidInputError.at("privacy.clip.adaptive", too_few(noise, num_expected))
    return of_sum, adaptive_clipping.answer_noise(num_expected)


def _secret(
    runs: LiveRuns, effect: AccountRound | AggregateRound, fingerprint: str
) -> tuple[bytes, str]:
    """Return the secret and the name of a round, from which the draws and the noise are derived.
    Raises SecretLostError."""
    job = runs.job_of(effect.run_id, effect.party)
    if job.privacy is not None and job.privacy.noise == "seeded":
        return seeded_secret(job.seed), str(effect.round_num)
    key = runs.spool_key(effect.run_id, effect.party, effect.round_num, 0)
    return runs.secret.get(fingerprint), str(key.folder)
