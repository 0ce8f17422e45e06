"""The allow list, and how errors of the user's code look."""

import inspect
import os
import sys
from pathlib import Path

import pytest

from stratagem.common.base.errors import ConflictError, InvalidInputError, UserCodeError
from stratagem.common.schema.json import frozen
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code
from tests.jobs import ALLOW, LOSSES

HERE = "tests.userland.models"


def test_allowed_names_resolve() -> None:
    for allowed, name in (
        (f"{HERE}:*", "mlp"),
        (f"{HERE}:mlp", "mlp"),
        ("tests.*", "Everything"),
    ):
        assert EntryPoints([allowed]).resolve(f"{HERE}:{name}").__name__ == name
    # What is listed by its own name may come from elsewhere, as when a package offers what its
    # modules define, and the list is that of `run --local`.
    name = f"{HERE}:borrowed"
    assert EntryPoints([name]).resolve(name) is os.getcwd
    with pytest.raises(InvalidInputError, match="reaches through a module"):
        EntryPoints([f"{HERE}:borrowed_module.join"]).resolve(f"{HERE}:borrowed_module.join")


def test_refused_before_import(tmp_path: Path) -> None:
    (tmp_path / "harmful_module.py").write_text("raise SystemError('imported')")
    entrypoints = EntryPoints(["good:*"], [tmp_path])
    with pytest.raises(InvalidInputError, match="which allows: good:") as caught:
        entrypoints.resolve("harmful_module:build", "model.entrypoint")
    assert "harmful_module" not in sys.modules
    assert caught.value.violations[0].field == "model.entrypoint"
    with pytest.raises(InvalidInputError, match=f'"good" is installed, or is in {tmp_path}$'):
        entrypoints.resolve("good:build")
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"{HERE}:borrowed_module.join", "reaches through a module"),
        (f"{HERE}:borrowed_module", "cannot be called"),
        (f"{HERE}:borrowed", "is really posix:getcwd"),
        (f"{HERE}:mlp.__globals__", "private"),
        (f"{HERE}:mlp.__class__", "private"),
        (f"{HERE}:NUM_CLASSES", "cannot be called"),
        (f"{HERE}:nothing", 'no attribute "nothing"'),
        (f"{HERE}:token_modle", 'no attribute "token_modle"; did you mean token_model.$'),
        (f"{HERE}:nn.Linear", "reaches through a module"),
        (f"{HERE}:checkpoint", "is really torch"),
        (HERE, "form"),
        ("../userland:mlp", "form"),
        (f"{HERE}:mlp()", "form"),
        ("os:system", "is not allowed"),
        (
            "tests.userland.missing:build",
            'no module "tests.userland.missing" is installed$',
        ),
    ],
)
def test_attacks_and_mistakes_are_refused(name: str, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        EntryPoints(["tests.userland.*"]).resolve(name)


def test_import_that_raises_is_an_error_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "broken_import.py").write_text("import json\nimport no_such_package_at_all\n")
    with pytest.raises(UserCodeError, match="no_such_package_at_all") as caught:
        EntryPoints(["broken_import:*"], [tmp_path]).resolve("broken_import:build")
    assert caught.value.activity == "importing broken_import"
    assert "broken_import.py" in caught.value.traceback
    assert "entrypoints.py" not in caught.value.traceback
    sys.path.remove(str(tmp_path))


def test_user_code_translates_exactly_once() -> None:
    with pytest.raises(UserCodeError) as caught, user_code("outer"), user_code("inner"):
        sys.exit(3)
    assert (caught.value.type, caught.value.message) == ("SystemExit", "3")
    assert caught.value.activity == "inner"
    with pytest.raises(ConflictError), user_code("ours passes"):
        raise ConflictError("ours")


def test_what_a_call_does_to_its_arguments_is_its_own() -> None:
    """The user's function gets plain lists and mappings, and fresh ones in every call; keywords
    that it does not take are named."""
    kwargs, name = frozen({"log": [1, {"deep": []}], "options": {"a": 1}}), f"{LOSSES}:spoiling"
    bound = EntryPoints([ALLOW]).bind(name, kwargs, "model")
    assert list(inspect.signature(bound).parameters) == ["extra", "log", "options"]
    for _ in range(2):
        log, options = bound(extra=3)
        assert (log, options) == ([1, {"deep": [3]}, 3], {})
        assert (type(log), type(log[1]), type(options)) == (list, dict, dict)
    assert kwargs == {"log": [1, {"deep": []}], "options": {"a": 1}}
    with pytest.raises(InvalidInputError) as caught:
        EntryPoints([ALLOW]).bind(name, {"optoins": {}, "log": []}, "model")
    assert str(caught.value) == (
        f"model.kwargs.optoins: {{}}, but \"{name}\" takes no 'optoins'; did you mean options?; "
        "it takes extra, log, options"
    )
