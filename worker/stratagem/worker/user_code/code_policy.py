"""The operator's policy of which code may come to this worker with a job.

`none` (code must be installed), `signed:FILE` (by one of the public keys of the file),
`digests:FILE` (listed in the file) or `any`. The files are read again when they change. A bundle
that the policy admits may name all that is in it: no list of entry points is asked.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.files import WatchedFiles
from stratagem.common.code.bundle import is_signed, read_public_keys
from stratagem.common.job import CodeSpec

Check = Callable[[CodeSpec], str]
"""Returns the reason against a bundle; nothing where it may run."""
FORMS: Final = "none, signed:FILE, digests:FILE or any"


class CodePolicy:
    """One policy, as `--allow-code` says it. Raises InvalidInputError for another text, or a file
    that cannot be used."""

    def __init__(self, text: str = "none") -> None:
        self._text = text
        kind, _, file = text.partition(":")
        if (kind in ("signed", "digests")) != bool(file) or kind not in _CHECKS:
            raise InvalidInputError.at("--allow-code", f"{text!r} is not one of {FORMS}")
        try:
            self._check = _CHECKS[kind](Path(file))
        except InvalidInputError as error:
            raise InvalidInputError.at("--allow-code", str(error)) from None

    def admit(self, code: CodeSpec) -> None:
        """Raise InvalidInputError, with the policy and what to do, unless the bundle may run."""
        reason = self._check(code)
        if reason:
            raise InvalidInputError.at("code", f"{reason} (--allow-code {self._text})")


def _none(_file: Path) -> Check:
    return lambda _: (
        "this worker takes no code from jobs: install the package on the workers and leave `code` "
        "out, or have their operator set --allow-code to signed:FILE, digests:FILE or any"
    )


def _any(_file: Path) -> Check:
    return lambda _: ""


def _signed(file: Path) -> Check:
    keys = WatchedFiles(
        [file], lambda: read_public_keys(file), unusable="keys of code cannot be used"
    )

    def check(code: CodeSpec) -> str:
        if code.signature is None:
            return (
                f"the bundle {code.digest} is not signed: `stratagem code sign` prints what "
                "belongs into code.signature"
            )
        if is_signed(code.digest or "", code.signature, keys.newest()):
            return ""
        return (
            f"code.signature is of another bundle than {code.digest}, or by a key that this worker "
            "does not trust: sign the files as they are now, with a key of its operator"
        )

    return check


def _digests(file: Path) -> Check:
    listed = WatchedFiles(
        [file], lambda: _read_digests(file), unusable="digests of code cannot be used"
    )

    def check(code: CodeSpec) -> str:
        if code.digest in listed.newest():
            return ""
        return f"the bundle {code.digest} is not among those that the operator has listed"

    return check


def _read_digests(file: Path) -> frozenset[str]:
    """The first word of each line; `#` begins a remark."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{file}: {error}") from None
    words = (line.partition("#")[0].split() for line in lines)
    return frozenset(first for first, *_ in filter(None, words))


_CHECKS: Final = {"none": _none, "signed": _signed, "digests": _digests, "any": _any}
