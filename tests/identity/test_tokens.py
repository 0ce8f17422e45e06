"""The file of known tokens, and the file of one."""

import json
import stat
from pathlib import Path

import pytest

from stratagem.common.base.errors import AlreadyExistsError, InvalidInputError, UnauthenticatedError
from stratagem.common.identity.callers import (
    Scope,
    TokenBook,
    TokenFile,
    add_token,
    new_token,
    read_tokens,
    remove_token,
    token_in,
    with_included,
)


def test_only_a_hash_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token, known = new_token("ci", [Scope.SUBMIT, Scope.READ])
    other, also_known = new_token("ops", [Scope.ADMIN], expires_s=2000.0)
    add_token(path, known)
    add_token(path, also_known)
    assert len(token) > 43
    assert token not in path.read_text()
    assert token.removeprefix("stratagem_") not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_tokens(path) == (known, also_known)
    book = TokenBook(path)
    assert book.find(token, now_s=1e12).name == "ci"
    assert book.find(other, now_s=1999.0).scopes == (Scope.ADMIN,)
    with pytest.raises(UnauthenticatedError, match="token ops has expired at 1970-01-01T00:33:20"):
        book.find(other, now_s=2000.0)
    for wrong in ("", "stratagem_", token[:-1], token + "x", token.swapcase(), known.sha256):
        with pytest.raises(UnauthenticatedError, match="not known"):
            book.find(wrong, now_s=0.0)


def test_changes_of_the_file_count_at_once(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    book = TokenBook(path)
    token, known = new_token("ci", [Scope.READ])
    with pytest.raises(UnauthenticatedError):
        book.find(token, 0.0)
    add_token(path, known)
    assert book.find(token, 0.0) == known
    with pytest.raises(AlreadyExistsError, match="'ci' already"):
        add_token(path, known)
    text = path.read_text()
    path.write_text("{")  # half a file revokes nobody, and lets nobody in
    assert book.find(token, 0.0) == known
    path.write_text(text)
    with pytest.raises(InvalidInputError, match="no token 'cd'; there are: ci"):
        remove_token(path, "cd")
    remove_token(path, "ci")
    with pytest.raises(UnauthenticatedError):
        book.find(token, 0.0)
    path.unlink()
    with pytest.raises(UnauthenticatedError):
        book.find(token, 0.0)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"tokens": 3}',
        '{"tokens": [{}]}',
        '{"tokens": [{"name": "a", "sha256": "00", "scopes": ["read"], "expires_s": null}]}',
        json.dumps({"tokens": [{"name": "a", "sha256": "0" * 64, "scopes": ["all"]}]}),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(content)
    with pytest.raises(InvalidInputError, match=r"tokens\.json is not a tokens file"):
        TokenBook(path)


def test_scopes_include_lesser_ones() -> None:
    assert with_included([]) == frozenset()
    assert with_included([Scope.READ]) == {Scope.READ}
    assert with_included([Scope.SUBMIT]) == {Scope.READ, Scope.SUBMIT}
    assert with_included([Scope.READ, Scope.ADMIN]) == set(Scope)
    with pytest.raises(InvalidInputError, match="some of read, submit, admin"):
        new_token("ci", [])
    with pytest.raises(InvalidInputError, match="name"):
        new_token("c i", [Scope.READ])


def test_a_callers_token_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(InvalidInputError, match=r"token_file: .*No such file"):
        TokenFile(path).metadata()
    path.write_text("hunter2\n")
    with pytest.raises(InvalidInputError, match="holds no token of `stratagem token create`"):
        TokenFile(path).metadata()
    first, second = new_token("a", [Scope.READ])[0], new_token("b", [Scope.READ])[0]
    path.write_text(first + "\n")
    file = TokenFile(path)
    assert token_in(file.metadata()) == first
    path.unlink()
    path.write_text(second)
    assert token_in(file.metadata()) == second
    assert token_in([]) == ""
    assert token_in([*file.metadata(), *file.metadata()]) == ""
