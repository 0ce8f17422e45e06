"""Bundles on a worker: policies, unpacking, and imports that do not meet each other."""

import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from stratagem.common.base.errors import IntegrityError, InvalidInputError, UserCodeError
from stratagem.common.code.bundle import digest_of, pack
from stratagem.common.code.signatures import make_keys, sign
from stratagem.common.job import CodeSpec
from stratagem.worker.user_code import bundles as bundle_import
from stratagem.worker.user_code.bundles import CodePolicy, CodeStore
from stratagem.worker.user_code.entrypoints import EntryPoints, UserCode
from tests.jobs import job

FIRST = {
    "model.py": b"import helper\nNAME = helper.NAME\ndef build(): return NAME\n",
    "helper.py": b"NAME = 'first'\n",
}
SECOND = {
    "model.py": (
        b"import random as installed\n"
        b"import package.deep.leaf\n"
        b"import package.deep.leaf as leaf\n"
        b"from package import NAME, sibling\n"
        b"from helper import *\n"
        b"def build():\n"
        b"    from package.deep import leaf as late\n"
        b"    assert late is leaf is package.deep.leaf\n"
        b"    assert FROM_HELPER and sibling.NAME == NAME\n"
        b"    assert installed.Random\n"
        b"    return NAME\n"
        b"def absent():\n"
        b"    import package.missing\n"
        b"def where():\n"
        b"    from pathlib import Path\n"
        b"    return (Path(__file__).parent / 'words.txt').read_text()\n"
    ),
    "helper.py": b"FROM_HELPER = True\n",
    "package/__init__.py": b"from .names import NAME\n",
    "package/names.py": b"NAME = 'second'\n",
    "package/sibling.py": b"from . import names\nfrom .names import NAME\n",
    "package/deep/leaf.py": b"from ..names import NAME\nimport package.sibling\n",
    "torch/notes.txt": b"a folder of data hides no installed package",
    "words.txt": b"read beside the module",
}


def archives(*bundles: Mapping[str, bytes]) -> dict[str, bytes]:
    return {digest_of(archive): archive for archive in map(pack, bundles)}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CodeStore]:
    monkeypatch.setenv(bundle_import.FOLDER_VARIABLE, "")
    before = set(sys.modules)
    store = CodeStore(tmp_path / "code")
    yield store
    for name in set(sys.modules) - before:
        if name.startswith(bundle_import.PREFIX):
            del sys.modules[name]


def resolver(store: CodeStore, archive: bytes, *allow: str) -> EntryPoints:
    digest = digest_of(archive)
    spec = job(code={"digest": digest})
    code = UserCode(EntryPoints(allow), CodePolicy("any"), store)
    return code.entry_points_of(spec, "run", lambda _: archive)


def test_two_bundles_with_the_same_names_live_in_one_process(store: CodeStore) -> None:
    path = list(sys.path)
    first, second = resolver(store, pack(FIRST)), resolver(store, pack(SECOND))
    assert first.resolve("model:build")() == "first"
    assert second.resolve("model:build")() == "second"
    assert second.resolve("package.sibling:NAME.upper")() == "SECOND"
    assert second.resolve("model:where")() == "read beside the module"
    assert first.resolve("model:build")() == "first"
    assert not {"model", "helper", "package"} & set(sys.modules)
    assert sys.path == path
    with pytest.raises(ModuleNotFoundError, match=r"'package\.missing' in the job's code"):
        second.resolve("model:absent")()
    # What a run leaves behind, the next one does not see.
    first.resolve("model:build").__globals__["NAME"] = "changed"
    store.drop_run("run")
    assert resolver(store, pack(FIRST)).resolve("model:build")() == "first"


def test_a_model_of_a_bundle_is_compiled_in_one_graph(store: CodeStore) -> None:
    source = (
        b"from torch import nn\nimport helper\n"
        b"class Model(nn.Module):\n"
        b"    def forward(self, x): return helper.twice(x) * len(x)\n"
    )
    code = resolver(store, pack({"model.py": source, "helper.py": b"def twice(x): return x + x"}))
    model: nn.Module = code.resolve("model:Model")()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(torch.ones(3)).tolist() == [6.0, 6.0, 6.0]


def test_a_bundle_is_looked_in_first_and_only_what_is_in_it_is_allowed(store: CodeStore) -> None:
    code = resolver(store, pack(FIRST), "tests.userland.models:*")
    assert code.resolve("tests.userland.models:mlp").__name__ == "mlp"
    with pytest.raises(InvalidInputError, match="is not allowed on this worker"):
        code.resolve("os:system")
    with pytest.raises(InvalidInputError, match="private"):
        code.resolve("model:build.__globals__")
    broken = resolver(store, pack({"model.py": b"1 / 0\n"}))
    with pytest.raises(UserCodeError, match="division by zero") as caught:
        broken.resolve("model:build")
    assert 'File "model.py", line 1, in <module>\n    1 / 0' in caught.value.traceback
    with pytest.raises(InvalidInputError, match=r'no module "model.part" .* the job\'s code'):
        resolver(store, pack(FIRST)).resolve("model.part:build")


def test_a_bundle_is_unpacked_whole_and_stays_as_it_is(store: CodeStore, tmp_path: Path) -> None:
    archive = pack(SECOND)
    digest = digest_of(archive)
    (tmp_path / "code" / ".part-of-one-that-was-killed").mkdir()
    store = CodeStore(tmp_path / "code")
    resolver(store, archive)
    assert [path.name for path in (tmp_path / "code").iterdir()] == [digest]
    folder = tmp_path / "code" / digest
    for path in folder.rglob("*"):
        assert not path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)
    with pytest.raises(IntegrityError, match="has the digest"):
        store.take("0" * 64, "run", lambda: archive)


@pytest.mark.parametrize("damage", ["changed", "more", "less", "link"])
def test_a_folder_that_has_changed_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setenv(bundle_import.FOLDER_VARIABLE, "")
    archive = pack(FIRST)
    digest = digest_of(archive)
    CodeStore(tmp_path / "code").take(digest, "run", lambda: archive)
    folder = tmp_path / "code" / digest
    folder.chmod(0o700)
    (folder / "helper.py").chmod(0o600)
    match damage:
        case "changed":
            (folder / "helper.py").write_text("NAME = 'other'\n")
        case "more":
            (folder / "random.py").write_text("")
        case "less":
            (folder / "helper.py").unlink()
        case "link":
            shutil.move(folder / "helper.py", tmp_path / "helper.py")
            (folder / "helper.py").symlink_to(tmp_path / "helper.py")
    asked: list[str] = []

    def fetch() -> bytes:
        asked.append(digest)
        return archive

    after = CodeStore(tmp_path / "code")
    after.take(digest, "run", fetch)
    after.take(digest, "run", fetch)
    assert asked == [digest]
    assert (folder / "helper.py").read_bytes() == FIRST["helper.py"]
    CodeStore(tmp_path / "code").take(digest, "run", fetch)
    assert asked == [digest]


def test_bundles_that_no_run_has_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bundle_import.FOLDER_VARIABLE, "")
    store = CodeStore(tmp_path / "code", max_bytes=250)
    made = archives(*({"data": bytes([number]) * 100} for number in range(4)))
    for number, (digest, archive) in enumerate(made.items()):
        store.take(digest, f"run-{number}", lambda archive=archive: archive)  # type: ignore[misc]
        os.utime(tmp_path / "code" / digest, (number, number))
        if number != 1:
            store.drop_run(f"run-{number}")
    kept = {path.name for path in (tmp_path / "code").iterdir()}
    assert kept == {list(made)[1], list(made)[3]}


def test_policies(tmp_path: Path) -> None:
    archive = digest_of(pack(FIRST))
    code, keys = CodeSpec(digest=archive), tmp_path / "key"
    make_keys(keys, tmp_path / "trusted")
    signed = CodeSpec(digest=archive, signature=sign(archive, keys))
    listed = tmp_path / "digests"
    listed.write_text("# of the team\n")
    CodePolicy("any").admit(code)
    with pytest.raises(InvalidInputError, match=r"takes no code .* \(--allow-code none\)"):
        CodePolicy().admit(signed)
    by_key = CodePolicy(f"signed:{tmp_path / 'trusted'}")
    by_key.admit(signed)
    with pytest.raises(InvalidInputError, match="is not signed: `stratagem code sign`"):
        by_key.admit(code)
    with pytest.raises(InvalidInputError, match="is of another bundle"):
        by_key.admit(CodeSpec(digest="0" * 64, signature=signed.signature))  # type: ignore[arg-type]
    by_digest = CodePolicy(f"digests:{listed}")
    with pytest.raises(InvalidInputError, match="not among those that the operator has listed"):
        by_digest.admit(signed)
    listed.write_text(f"# of the team\n{archive}  # model, version 3\n")
    by_digest.admit(code)
    for wrong in ("signed", "any:file", "some", f"signed:{listed}", "digests:/missing"):
        with pytest.raises(InvalidInputError, match="--allow-code"):
            CodePolicy(wrong)


def test_what_a_job_requires_is_looked_for_before_anything_else(store: CodeStore) -> None:
    """And nothing is fetched that the policy refuses."""
    code = UserCode(EntryPoints(["*:*"]), CodePolicy(), store)
    spec = job(requires=["numpy>=1,<99", "missing-package>=3", "torch<1; python_version>'3'"])
    with pytest.raises(InvalidInputError, match=r"requires: .* lacks missing-package>=3, torch<1"):
        code.entry_points_of(spec, "run", lambda _: b"")
    there = job(requires=["numpy", "missing-package; python_version<'3'"])
    assert code.entry_points_of(there, "run", lambda _: b"").allow == ["*:*"]
    for wrong in ("numpy >", "numpy @ https://example.org/numpy.whl", "", "n" * 300):
        with pytest.raises(InvalidInputError, match=r"requires\[0\]"):
            job(requires=[wrong])
    spec = job(code={"digest": "0" * 64})
    with pytest.raises(InvalidInputError, match="takes no code"):
        code.entry_points_of(spec, "run", lambda _: pytest.fail("was fetched"))
