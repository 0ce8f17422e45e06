"""AccountRound: draw the clients of a private round in secret, and compute what it will cost.

Also what the fold of such a round needs: its secret, its noise, and the next clipping norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Digest
from stratagem.common.job import JobSpec, PrivacySpec
from stratagem.common.job.privacy import too_few
from stratagem.common.privacy import accountant, adaptive_clipping
from stratagem.common.privacy.noise import SecretLostError, fingerprint_of, seeded_secret
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.files import parse_header
from stratagem.common.tensors.manifest import WITHIN_NORM, Manifest
from stratagem.coordinator.core.effects import AccountRound, AggregateRound
from stratagem.coordinator.core.facts import RoundAccounted, RunFailed
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.strategies.federated.federated_run import spec_of
from stratagem.coordinator.updates.privacy.private_mean import PrivateMean
from stratagem.coordinator.updates.privacy.round_noise import (
    TensorNoise,
    drawn_clients,
    noised_share,
)
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.state_reader import StateReader


async def account_round(env: EffectContext, effect: AccountRound) -> None:
    """Report RoundAccounted, or the end of a run that cannot be accounted."""
    try:
        fact: RoundAccounted | RunFailed = await env.in_thread(lambda: _accounted(env, effect))
    except (SecretLostError, InvalidInputError) as error:
        fact = RunFailed(reason=f"round {effect.round_num}: {error}")
    except ModuleNotFoundError:
        fact = RunFailed(reason=f"privacy: this coordinator {accountant.NEEDED}")
    failpoint("coordinator.privacy.accounted")
    await env.report(effect.run_id, fact)
    rounds = spec_of(env.job_of(effect.run_id, effect.party)).rounds
    if isinstance(fact, RoundAccounted) and effect.round_num < rounds:
        env.chores.do(_ahead(env, effect, fact), f"account round {effect.round_num + 1}")


async def _ahead(env: EffectContext, effect: AccountRound, fact: RoundAccounted) -> None:
    """Compute what the round after this one will have cost, while this one trains: the accountant
    remembers it, and nothing is decided here."""
    costs = (effect.num_spent + 2, fact.noise_multiplier, fact.sampling_rate, fact.delta)
    await env.in_thread(lambda: accountant.epsilon_after(*costs))


@dataclass(frozen=True, slots=True)
class PrivateRound:
    """The noise of the fold of one round: what it is derived from, and how much there is."""

    secret: bytes
    name: str
    """That of the round's folder in the spool, which no other round has."""
    accounted: RoundAccounted

    @classmethod
    def of(cls, env: EffectContext, effect: AggregateRound, accounted: RoundAccounted) -> Self:
        """Return the noise of a fold. Raises SecretLostError."""
        secret, name = _secret(env, effect, accounted.fingerprint)
        return cls(secret, name, accounted)

    def mean(self, manifest: Manifest, base: StateReader) -> PrivateMean:
        """Return what makes the sum of the changes to this base the next state."""
        return PrivateMean(TensorNoise(self.secret, self.name, manifest), self.accounted, base)

    def next_norm(self, job: JobSpec, entries: Sequence[SpoolEntry]) -> float:
        """Return the clipping norm of the next round, from what the clients have said of theirs."""
        norm, noise = self.accounted.clip_norm, self.accounted.answer_noise
        adaptive = job.privacy and job.privacy.clip.adaptive
        if not adaptive:
            return norm
        num_within, num_expected = sum(map(_is_within, entries)), self.accounted.num_expected
        share = noised_share(self.secret, self.name, num_within, noise, num_expected)
        return adaptive_clipping.next_norm(norm, share, adaptive.quantile, adaptive.rate)


def _is_within(entry: SpoolEntry) -> bool:
    """Return what a client has said with its update: that its change was not clipped."""
    with entry.path.open("rb") as file:
        manifest, _ = parse_header(file, Digest(entry.path.name))
    return manifest.metadata.get(WITHIN_NORM) == "1"


def _accounted(env: EffectContext, effect: AccountRound) -> RoundAccounted:
    """Return the account of the next round; for a thread. Raises SecretLostError, and
    InvalidInputError for a job whose target or adaptive clipping is out of reach."""
    job = env.job_of(effect.run_id, effect.party)
    spec, strategy = job.privacy, spec_of(job)
    assert spec is not None
    secret, name = _secret(env, effect, effect.fingerprint)
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
    """Return the noise on the changes, over the clipping norm, and that on the answers."""
    if spec.clip.adaptive is None:
        return noise, 0.0
    of_sum = adaptive_clipping.sum_noise_multiplier(noise, num_expected)
    if of_sum is None:
        raise InvalidInputError.at("privacy.clip.adaptive", too_few(noise, num_expected))
    return of_sum, adaptive_clipping.answer_noise(num_expected)


def _secret(
    env: EffectContext, effect: AccountRound | AggregateRound, fingerprint: str
) -> tuple[bytes, str]:
    """Return what the draws and the noise of a round are derived from: a secret, and the name of
    the round. Raises SecretLostError."""
    job = env.job_of(effect.run_id, effect.party)
    if job.privacy is not None and job.privacy.noise == "seeded":
        return seeded_secret(job.seed), str(effect.round_num)
    key = env.spool_key(effect.run_id, effect.party, effect.round_num, 0)
    return env.secret.get(fingerprint), str(key.folder)
