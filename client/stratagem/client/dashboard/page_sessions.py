"""Who may read the page: browsers that have shown the token once, each by a cookie of its own."""

import hmac
import secrets
from collections import deque
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Final

from stratagem.common.base.errors import InvalidInputError

MAX_SESSIONS: Final = 1000
"""Cookies that count at once; the oldest one ends when there is another."""
MIN_TOKEN_CHARS: Final = 16


def token_in(path: Path) -> str:
    """Return the token in a file. Raises InvalidInputError for a file without a usable one."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError.at("--page-token-file", f"{path}: {error}") from None
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        text = f"{path} holds no token: at least {MIN_TOKEN_CHARS} printable ASCII characters"
        raise InvalidInputError.at("--page-token-file", text)
    return token


class PageSessions:
    """The token of the page, and the cookies that were given for it."""

    def __init__(self, token: str, port: int) -> None:
        self.token = token
        self.cookie = f"stratagem-{port}"  # cookies are shared by all ports of a host
        self._open: deque[str] = deque(maxlen=MAX_SESSIONS)

    def begin(self, token: str) -> str | None:
        """Return the value of a new cookie; None for a wrong token."""
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return None
        self._open.append(secrets.token_urlsafe(32))
        return self._open[-1]

    def knows(self, cookie_header: str) -> bool:
        """Return whether a request carries a cookie that counts."""
        try:
            morsel = SimpleCookie(cookie_header).get(self.cookie)
        except CookieError:
            return False
        if morsel is None:
            return False
        shown = morsel.value.encode()
        return any(hmac.compare_digest(shown, each.encode()) for each in self._open)
