"""Finds one-line changes of a file that are defects: a comparison turned, one more or less, a call
left out. Pure: text in, changes out.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
OTHER = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Change:
    """One line of a file becomes another."""

    file: str
    line: str
    """The whole line, as it stands."""
    becomes: str
    nth: int = 0
    """Which of several lines of the file that read the same."""

    def applied(self, text: str) -> str | None:
        """The file's text after the change; None where it has no such line any more."""
        lines = text.split("\n")
        found = [i for i, each in enumerate(lines) if each == self.line]
        if self.nth >= len(found):
            return None
        lines[found[self.nth]] = self.becomes
        return "\n".join(lines)


def proposals(file: str, text: str) -> Iterator[Change]:
    """All changes of what a file's functions do."""
    lines = text.split("\n")
    for node in _acting(ast.parse(text)):
        other = _changed(node)
        if other is None or node.lineno != node.end_lineno:
            continue
        line = lines[node.lineno - 1]
        raw = line.encode()
        changed = raw[: node.col_offset] + other.encode() + raw[node.end_col_offset :]
        nth = lines[: node.lineno - 1].count(line)
        yield Change(file, line, changed.decode(), nth)


def _acting(tree: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    """What stands in functions and is neither an annotation nor a message of an error."""

    def walk(node: ast.AST, inside: bool) -> Iterator[ast.expr | ast.stmt]:
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.arguments)):
            return
        if isinstance(node, ast.AnnAssign):
            if node.value:
                yield from walk(node.value, inside)
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in node.body:
                yield from walk(statement, True)
            return
        if inside and isinstance(node, (ast.expr, ast.stmt)):
            yield node
        for each in ast.iter_child_nodes(node):
            yield from walk(each, inside)

    return walk(tree, False)


def _changed(node: ast.expr | ast.stmt) -> str | None:
    """The text in place of a node's, in brackets where what is around it may bind closer."""
    match node:
        case ast.Compare(left, [op], [right]):
            other: ast.expr = ast.Compare(left, [COMPARED[type(op)]()], [right])
        case ast.BinOp(left, operator, right) if type(operator) in COMPUTED:
            other = ast.BinOp(left, COMPUTED[type(operator)](), right)
        case ast.BoolOp(kind, values):
            other = ast.BoolOp(ast.Or() if isinstance(kind, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            other = operand
        case ast.Call(ast.Name(name)) if name in OTHER:
            return ast.unparse(ast.Call(ast.Name(OTHER[name]), node.args, node.keywords))
        case ast.Constant(int(value)) if not isinstance(value, bool):
            return str(value + 1)
        case ast.Expr(ast.Call()):
            return "pass"
        case _:
            return None
    return f"({ast.unparse(other)})"
