"""The product's modules as Python parses them: what each imports, and which names it uses."""

import ast
import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.repository import ROOT

PARTS = ("common", "coordinator", "worker", "tools", "client")


@dataclass(frozen=True)
class Module:
    """One file of the product."""

    name: str
    """Dotted, without `stratagem.`; a package is called as its folder is."""
    path: Path

    @property
    def is_package(self) -> bool:
        """True for the `__init__.py` of a folder."""
        return self.path.name == "__init__.py"

    @property
    def folder(self) -> str:
        """The dotted name of the folder that it lies in."""
        return self.name if self.is_package else self.name.rpartition(".")[0]


@cache
def tree(path: Path) -> ast.Module:
    """A file, parsed once."""
    # Nothing of a tree is garbage; who looks for some meanwhile takes half of the time.
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All that stands in it, walked once."""
    return tuple(ast.walk(tree(path)))


@cache
def product() -> Mapping[str, Module]:
    """All modules by name, but for the generated stubs."""
    found = {}
    for part in PARTS:
        source = ROOT / part / "stratagem"
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            if parts[0] != "v1":
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                found[name] = Module(name, path)
    return found


def product_files() -> list[Path]:
    """The files of all these modules."""
    return [module.path for module in product().values()]


def resolve(target: str, name: str = "") -> tuple[str, str] | None:
    """The module of the product, and the name in it, that `from target import name` means.

    The name is "" where a module is meant; None where the target is no part of the product.
    """
    root, _, inner = target.partition(".")
    if root != "stratagem":
        return None
    if f"{inner}.{name}".strip(".") in product():
        return f"{inner}.{name}".strip("."), ""
    return (inner, name) if inner in product() else None


@cache
def imports(path: Path) -> tuple[tuple[str, str, str], ...]:
    """What a file imports, wherever in it: the module, the name in it or "", and what the file
    calls it."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, str, str]]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                yield node.module or "", alias.name, alias.asname or alias.name


@cache
def imported(module: Module) -> frozenset[str]:
    """The modules of the product that one imports, for its types alone as well."""
    found = (resolve(target, name) for target, name, _ in imports(module.path))
    return frozenset(each[0] for each in found if each is not None)


@cache
def foreign(module: Module) -> frozenset[str]:
    """The top-level packages of others that a module imports."""
    roots = {target.partition(".")[0] for target, _, _ in imports(module.path)}
    return frozenset(roots - {"stratagem"})


def reachable(names: Iterable[str]) -> frozenset[str]:
    """These modules and all that they import, directly or through others, with the packages that
    Python imports on the way."""
    modules = product()
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found or name not in modules:
            continue
        found.add(name)
        waiting += [*imported(modules[name]), name.rpartition(".")[0]]
    return frozenset(found)


def folder_arrows() -> Mapping[str, frozenset[str]]:
    """For each folder the other folders whose modules its own import."""
    modules = product()
    arrows: dict[str, set[str]] = {}
    for module in modules.values():
        into = {modules[name].folder for name in imported(module)}
        arrows.setdefault(module.folder, set()).update(into - {module.folder})
    return {folder: frozenset(into) for folder, into in arrows.items()}


def circles(arrows: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The nodes from which an arrow leads back to them, over whichever others."""
    return frozenset(node for node in arrows if node in _reached(arrows, arrows[node]))


def _reached(arrows: Mapping[str, frozenset[str]], begin: Iterable[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(begin)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += arrows.get(node, ())
    return found
