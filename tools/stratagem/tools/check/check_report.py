"""Collects what the checks of a job find; what one of them raises becomes findings of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from stratagem.common.base.errors import InvalidInputError, StratagemError, UserCodeError
from stratagem.common.observe.findings import Finding, Level

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings about one job, in the order of the checks."""

    say: Callable[[Finding], None] = lambda _: None
    """Is given each finding as soon as it is there."""
    findings: list[Finding] = field(default_factory=list)

    def ok(self, check: str, about: str, found: str) -> None:
        """Add that something is as it should be."""
        self._add(Finding(check, about, Level.OK, found))

    def warn(self, check: str, about: str, found: str, advice: str = "") -> None:
        """Add what need not be wrong, or could not be checked."""
        self._add(Finding(check, about, Level.WARN, found, advice))

    def fail(self, check: str, about: str, found: str, advice: str = "") -> None:
        """Add a fault, for which the job would be refused or fail. Several checks may come upon the
        same one: only the first says it."""
        said = {(known.about, known.found) for known in self.findings if known.level is Level.FAIL}
        if (about, found) not in said:
            self._add(Finding(check, about, Level.FAIL, found, advice))

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self.say(finding)

    def has_failed(self, text: str) -> bool:
        """Return whether a text tells a fault that has been added."""
        return any(each.level is Level.FAIL and each.found in text for each in self.findings)

    def attempt(self, check: str, about: str, action: Callable[[], T]) -> T | None:
        """Return what the action returns; None where it raises, whose faults are then added.

        about: the field that the check is about, where the error names none.
        """
        try:
            return action()
        except UserCodeError as error:
            self.fail(check, about, f"{error.type}: {error.message}", _place_of(error))
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


def _place_of(error: UserCodeError) -> str:
    """Return what was done, and the frames of the traceback, whose last words are the message."""
    lines = error.traceback.rstrip().splitlines()
    while lines and not lines[-1].startswith("  "):
        del lines[-1]
    frames = [line for line in lines if not line.startswith("Traceback")]
    return "\n".join([f"{error.activity}, at" if frames else error.activity, *frames])
