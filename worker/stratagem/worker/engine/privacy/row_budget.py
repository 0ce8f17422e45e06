"""What the rounds of a client have cost in privacy of its rows, and the refusal of one too many."""

from dataclasses import dataclass

from stratagem.common.base.errors import BudgetSpentError, InvalidInputError
from stratagem.common.base.text import beyond_text
from stratagem.common.job import JobSpec
from stratagem.common.privacy import accountant
from stratagem.common.strategy import Federated


@dataclass(frozen=True, slots=True)
class RowCosts:
    """How the rows of one client are drawn, and what that costs."""

    num_rows: int
    batch_size: int
    local_epochs: int
    noise_multiplier: float
    delta: float

    @classmethod
    def of(cls, job: JobSpec, num_rows: int) -> "RowCosts":
        """Return the costs of a client with so many rows."""
        assert job.privacy is not None
        assert job.privacy.noise_multiplier is not None
        assert isinstance(job.strategy, Federated)
        return cls(
            num_rows,
            job.batch_size,
            job.strategy.options.local_epochs,
            job.privacy.noise_multiplier,
            job.privacy.target.delta,
        )

    @property
    def rate(self) -> float:
        """The probability with which each row takes part in a step."""
        return min(1.0, self.batch_size / self.num_rows)

    @property
    def num_expected(self) -> float:
        """Rows that are expected in a step."""
        return self.rate * self.num_rows

    @property
    def steps_per_round(self) -> int:
        """As many as it would take to go through the rows in batches."""
        return self.local_epochs * -(-self.num_rows // self.batch_size)

    def epsilon_after(self, num_rounds: int) -> float:
        """Return what so many rounds spend. Raises InvalidInputError without the accountant."""
        if not accountant.is_installed():
            raise InvalidInputError.at("privacy", f"this worker {accountant.NEEDED}")
        num_steps = num_rounds * self.steps_per_round
        return accountant.epsilon_after(num_steps, self.noise_multiplier, self.rate, self.delta)


def check_budget(costs: RowCosts, target: float | None, num_spent: int) -> float:
    """Return epsilon with the round that follows `num_spent` ones. Raises BudgetSpentError where
    that is more than the target."""
    epsilon = costs.epsilon_after(num_spent + 1)
    if target is not None and epsilon > target:
        before = costs.epsilon_after(num_spent)
        raise BudgetSpentError(
            f"privacy budget: {before:.3g} of {target:g} spent in {num_spent} rounds, and one more "
            f"would cost {beyond_text(epsilon, target)}"
        )
    return epsilon
