"""Which public names of the product's modules somebody uses besides the tests.

A name is used where its own module reads it, where another module, an example, a benchmark or a
page of the documentation imports it, and where it is registered in pyproject.toml.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.house.source import Module, imports, nodes, product, resolve, tree
from tests.repository import ROOT

Symbol = tuple[str, str]
"""A module and a public name at its top level."""

PLAIN_DECORATORS = {"cache", "contextmanager", "asynccontextmanager", "dataclass", "lru_cache"}
PLAIN_DECORATORS |= {"final", "overload", "runtime_checkable", "total_ordering", "wraps"}
"""Any other one may register what it decorates."""


def defined(module: Module) -> Iterator[str]:
    """The public names that a module defines at its top level."""
    for node in tree(module.path).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if not _is_registered(node):
                    yield node.name
            case ast.Assign():
                yield from (each.id for each in node.targets if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def _is_registered(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    called = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    names = {ast.unparse(each).rpartition(".")[2] for each in called}
    return not names <= PLAIN_DECORATORS


def public_symbols() -> frozenset[Symbol]:
    """All public names of the product, but for the migrations', which alembic reads by name."""
    return frozenset(
        (module.name, name)
        for module in product().values()
        for name in defined(module)
        if not name.startswith("_") and ".migrations.versions" not in module.name
    )


def public_classes() -> list[Symbol]:
    """Those of them that are classes, wherever they are registered."""
    return [
        (module.name, node.name)
        for module in product().values()
        for node in tree(module.path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def used_symbols() -> frozenset[Symbol]:
    """Those that anybody but a test uses; the whole module where it is handed on as a value."""
    users = [module.path for module in product().values()]
    users += [
        path for part in ("examples", "benchmarks", "docs") for path in (ROOT / part).rglob("*.py")
    ]
    used = {symbol for path in users for symbol in _used_by(path)}
    used |= {symbol for module in product().values() for symbol in _used_at_home(module)}
    used |= set(_registered()) | set(_in_pages())
    whole = {name for name, symbol in used if symbol == "*"}
    return frozenset(used | {symbol for symbol in public_symbols() if symbol[0] in whole})


def _used_at_home(module: Module) -> Iterator[Symbol]:
    for node in nodes(module.path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield module.name, node.id


def _used_by(path: Path) -> Iterator[Symbol]:
    names: dict[str, str] = {}
    """Modules by what the file calls them."""
    for target, name, called in imports(path):
        found = resolve(target, name)
        if found is not None and found[1]:
            yield found
            yield from _origin(found)
        elif found is not None and name:
            names[called] = found[0]
    is_rooted = any(called == "stratagem" for _, _, called in imports(path))
    bases = set()
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in names:
                bases.add(id(node.value))
                yield names[node.value.id], node.attr
            elif is_rooted and (dotted := _dotted(node))[0] == "stratagem":
                yield ".".join(dotted[1:-1]), node.attr
    for node in nodes(path):
        if isinstance(node, ast.Name) and node.id in names and id(node) not in bases:
            yield names[node.id], "*"
        elif isinstance(node, ast.Call) and _dotted(node.func)[-1] == "import_module":
            literals = (each.value for each in node.args if isinstance(each, ast.Constant))
            yield from ((each.removeprefix("stratagem."), "*") for each in map(str, literals))


def _dotted(node: ast.expr) -> list[str]:
    """The names of a.b.c; "" stands first where it begins with something else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *names]


def _origin(symbol: Symbol) -> Iterator[Symbol]:
    """Where a name comes from that a package only passes on."""
    module, name = symbol
    if product()[module].is_package:
        for target, given, called in imports(product()[module].path):
            found = resolve(target, given)
            if called == name and found is not None and found[1]:
                yield found


def _registered() -> Iterator[Symbol]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups: Mapping[str, Mapping[str, str]] = project.get("entry-points", {})
    for target in [*project["scripts"].values(), *(t for g in groups.values() for t in g.values())]:
        module, _, name = target.partition(":")
        yield module.removeprefix("stratagem."), name or "*"


@cache
def _in_pages() -> frozenset[Symbol]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    found = re.findall(r"from (stratagem[\w.]*) import (\([^)]*\)|[^\n]*)", text)
    symbols = {
        resolved
        for target, names in found
        for name in re.findall(r"\w+", names)
        if (resolved := resolve(target, name)) is not None
    }
    return frozenset(symbols | {origin for symbol in symbols for origin in _origin(symbol)})
