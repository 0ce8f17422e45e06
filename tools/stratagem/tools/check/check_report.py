"""Collects what the checks of a job find; what one of them raises becomes findings of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from stratagem.common.base.errors import InvalidInputError, StratagemError, UserCodeError
from stratagem.common.diagnostics.findings import Finding, Level

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings about one job, in the order of the checks."""

    findings: list[Finding] = field(default_factory=list)

    def ok(self, check: str, about: str, found: str) -> None:
        """Add that something is as it should be."""
        self.findings.append(Finding(check, about, Level.OK, found))

    def warn(self, check: str, about: str, found: str, advice: str = "") -> None:
        """Add what need not be wrong, or could not be checked."""
        self.findings.append(Finding(check, about, Level.WARN, found, advice))

    def fail(self, check: str, about: str, found: str, advice: str = "") -> None:
        """Add a fault, for which the job would be refused or fail. Several checks may come upon the
        same one: only the first says it."""
        said = {(known.about, known.found) for known in self.findings if known.level is Level.FAIL}
        if (about, found) not in said:
            self.findings.append(Finding(check, about, Level.FAIL, found, advice))

    def attempt(self, check: str, about: str, action: Callable[[], T]) -> T | None:
        """Return what the action returns; None where it raises, whose faults are then added.

        about: the field that the check is about, where the error names none.
        """
        try:
            return action()
        except UserCodeError as error:
            trace = error.traceback.rstrip()
            advice = f"{error.activity}: see the traceback\n{trace}" if trace else error.activity
            self.fail(check, about, f"{error.type}: {error.message}", advice)
        except InvalidInputError as error:
            for violation in error.violations:
                self.fail(check, violation.field or about, violation.message)
            if not error.violations:
                self.fail(check, about, str(error))
        except StratagemError as error:
            self.fail(check, about, str(error))
        except RuntimeError as error:  # of torch, which our code has called
            self.fail(check, about, f"{type(error).__name__}: {error}")
        return None
