"""Who may read the page: browsers that have shown the token once, each by a cookie of its own."""

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Final

from stratagem.common.base.errors import InvalidInputError

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
    """The token of the page, and the cookies that were given for it.

    A cookie is a random number with its signature by the token. So none is kept, and a page that
    is started again with the same token knows those of before.
    """

    def __init__(self, token: str, port: int) -> None:
        self._token = token.encode()
        self.cookie = f"stratagem-{port}"  # cookies are shared by all ports of a host

    def begin(self, token: str) -> str | None:
        """Return the value of a new cookie; None for a wrong token."""
        if not hmac.compare_digest(token.encode(), self._token):
            return None
        number = secrets.token_urlsafe(24)
        return f"{number}.{self._signature(number)}"

    def knows(self, cookie_header: str) -> bool:
        """Return whether a request carries a cookie that counts."""
        try:
            morsel = SimpleCookie(cookie_header).get(self.cookie)
        except CookieError:
            return False
        if morsel is None:
            return False
        number, _, signature = morsel.value.partition(".")
        return hmac.compare_digest(signature.encode(), self._signature(number).encode())

    def _signature(self, number: str) -> str:
        signed = f"{self.cookie} {number}"  # a page of the same token elsewhere is another one
        return hmac.new(self._token, signed.encode(), "sha256").hexdigest()
