"""Keys of an object store from a file, which is read again when it may have changed.

The file is the shared credentials file of AWS tools, as AWS_SHARED_CREDENTIALS_FILE names it:

    [default]
    aws_access_key_id = ...
    aws_secret_access_key = ...

Keys in the environment come first; without either, those of the machine's role are used.
"""

import configparser
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from stratagem.common.base.errors import InvalidInputError

FILE_VARIABLE: Final = "AWS_SHARED_CREDENTIALS_FILE"
_KEY_VARIABLE: Final = "AWS_ACCESS_KEY_ID"
_PROFILE_VARIABLE: Final = "AWS_PROFILE"

VALID_FOR: Final = timedelta(minutes=15)
"""obstore asks again five minutes before this is over, so new keys are taken without a restart."""


def credentials_from_file(environ: Mapping[str, str]) -> Callable[[], dict[str, Any]] | None:
    """Return a function that reads the keys, after a first read now; None where the environment
    names no file, or keys.

    Raises InvalidInputError, which never quotes the file's content.
    """
    if environ.get(_KEY_VARIABLE) or not environ.get(FILE_VARIABLE):
        return None
    path, profile = Path(environ[FILE_VARIABLE]), environ.get(_PROFILE_VARIABLE) or "default"

    def read() -> dict[str, Any]:
        keys = _section(path, profile)
        return {
            "access_key_id": keys["aws_access_key_id"],
            "secret_access_key": keys["aws_secret_access_key"],
            "token": keys.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + VALID_FOR,
        }

    read()
    return read


def describe(environ: Mapping[str, str]) -> str:
    """Return where the keys come from, for display."""
    if environ.get(_KEY_VARIABLE):
        return f"the environment ({_KEY_VARIABLE})"
    if environ.get(FILE_VARIABLE):
        return f"{environ[FILE_VARIABLE]} ({FILE_VARIABLE})"
    return f"the machine's role, as neither {_KEY_VARIABLE} nor {FILE_VARIABLE} is set"


def _section(path: Path, profile: str) -> Mapping[str, str]:
    parser = configparser.RawConfigParser(default_section="")
    try:
        parser.read_string(path.read_text())
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror}"
        raise InvalidInputError.at(FILE_VARIABLE, reason) from None
    except (configparser.Error, UnicodeDecodeError):
        raise InvalidInputError.at(FILE_VARIABLE, f"{path} is no file of [sections]") from None
    if not parser.has_section(profile):
        raise InvalidInputError.at(FILE_VARIABLE, f"{path} has no section [{profile}]")
    section = parser[profile]
    for key in ("aws_access_key_id", "aws_secret_access_key"):
        if not section.get(key):
            raise InvalidInputError.at(FILE_VARIABLE, f"{path}: [{profile}] has no {key}")
    return section
