"""Rules of the house that a machine can check."""

import ast
import re
from pathlib import Path

import pytest

from stratagem.common.process.failpoints import FAILPOINTS
from stratagem.coordinator.service.service import CoordinatorServicer
from stratagem.v1 import coordinator_pb2_grpc, peer_pb2_grpc, worker_pb2_grpc
from stratagem.worker.mesh.peers import PeerServicer
from stratagem.worker.service.service import WorkerServicer
from tests.generate_stubs import generate
from tests.house.source import PARTS, foreign, nodes, product, product_files, tree
from tests.repository import ROOT

pytestmark = pytest.mark.core

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
SERVED = {
    CoordinatorServicer: coordinator_pb2_grpc.CoordinatorServiceServicer,
    WorkerServicer: worker_pb2_grpc.WorkerServiceServicer,
    PeerServicer: peer_pb2_grpc.PeerServiceServicer,
}


def test_every_call_is_implemented() -> None:
    """The generated base class answers UNIMPLEMENTED."""
    for servicer, generated in SERVED.items():
        calls = [name for name in vars(generated) if not name.startswith("_")]
        assert calls
        missing = [name for name in calls if getattr(servicer, name) is getattr(generated, name)]
        assert not missing, f"{servicer.__name__} does not implement {missing}"


def test_nobody_draws_from_the_generator_that_user_code_draws_from() -> None:
    allowed = {"Random", "seed", "getstate", "setstate"}
    for path in product_files():
        for node in nodes(path):
            match node:
                case ast.Attribute(value=ast.Name(id="random"), attr=name):
                    assert name in allowed, f"{path}: random.{name}"


def test_no_pickle_anywhere() -> None:
    for module in product().values():
        unsafe = foreign(module) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
        assert not unsafe, module.path
        text = module.path.read_text()
        assert "torch.load" not in text, module.path
        assert "allow_pickle=True" not in text, module.path


def test_namespace_has_no_file_of_its_own() -> None:
    for root in (ROOT / part / "stratagem" for part in PARTS):
        assert [path.name for path in root.iterdir() if path.is_file()] == []
        for package in root.iterdir():
            if package.name != "__pycache__":
                assert (package / "py.typed").exists(), package


def test_files_and_functions_stay_small_and_every_module_says_what_it_owns() -> None:
    for path in product_files():
        text = path.read_text()
        assert len(text.splitlines()) <= MAX_FILE_LINES, path
        assert not text.strip() or ast.get_docstring(tree(path)), path
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                assert lines <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {lines} lines"


def test_failpoints_are_placed_exactly_once() -> None:
    placed = [
        name
        for path in product_files()
        for name in re.findall(r'failpoint\(\s*"([^"]+)"', path.read_text())
    ]
    assert sorted(placed) == sorted(FAILPOINTS)


def test_committed_stubs_are_what_the_protos_say(tmp_path: Path) -> None:
    generate(tmp_path)
    for fresh in sorted((tmp_path / "stratagem" / "v1").iterdir()):
        committed = ROOT / "common" / "stratagem" / "v1" / fresh.name
        assert committed.read_text() == fresh.read_text(), f"{fresh.name}: run `make proto`"
