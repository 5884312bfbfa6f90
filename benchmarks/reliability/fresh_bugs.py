"""Bugs that nobody has thought of: one small change in each of some functions of the source, drawn by a seed.

A function is drawn first and then a kind of change, so that small functions and rare kinds come as often as others.
Some changes break nothing (a bound that is never met): a reader has to decide which.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

SWAPPED: tuple[tuple[type[ast.AST], type[ast.AST]], ...] = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.FloorDiv, ast.Mod), (ast.BitAnd, ast.BitOr)),
)
OPPOSITES = {one: other for pair in SWAPPED for one, other in (pair, pair[::-1])}
CALLED_INSTEAD = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "list": "sorted"}
# Methods without which a value is nearly the same.
CLEANING = ("strip", "rstrip", "lower", "removesuffix", "resolve", "absolute", "clone", "detach", "copy")
# Methods that leave something done.
DOING = ("flush", "fsync", "close", "clear", "update", "append", "add", "unlink", "mkdir", "rename", "replace", "pop")

Change = tuple[ast.stmt, ast.AST, str]


@dataclass(frozen=True)
class Bug:
    """A change of a file: what it breaks, the lines of the statements that it changes, and the text with the bug."""

    file: str
    breaks: str
    lines: range
    source: str

    @property
    def in_function(self) -> bool:
        """Whether a test executes the lines, and not the import of the module."""
        functions = [node for node in ast.walk(ast.parse(self.source)) if isinstance(node, ast.FunctionDef)]
        return any(node.body[0].lineno <= self.lines.start <= (node.end_lineno or 0) for node in functions)


def _compared(node: ast.Compare) -> Iterator[ast.AST]:
    for place, op in enumerate(node.ops):
        other = copy.deepcopy(node)
        other.ops[place] = OPPOSITES[type(op)]()  # type: ignore[call-overload]
        yield other


def _joined(node: ast.BoolOp) -> Iterator[ast.AST]:
    yield ast.BoolOp(OPPOSITES[type(node.op)](), node.values)  # type: ignore[arg-type]
    for place in range(len(node.values)):
        left = node.values[:place] + node.values[place + 1 :]
        yield left[0] if len(left) == 1 else ast.BoolOp(node.op, left)


def _computed(node: ast.BinOp) -> Iterator[ast.AST]:
    if type(node.op) in OPPOSITES:
        yield ast.BinOp(node.left, OPPOSITES[type(node.op)](), node.right)  # type: ignore[arg-type]


def _number(node: ast.Constant) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)


def _called(node: ast.Call) -> Iterator[ast.AST]:
    for place, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            yield ast.Call(node.func, node.args, node.keywords[:place] + node.keywords[place + 1 :])
    if len(node.args) == 2 and not any(isinstance(argument, ast.Starred) for argument in node.args):
        yield ast.Call(node.func, node.args[::-1], node.keywords)
    if isinstance(node.func, ast.Name) and node.func.id in CALLED_INSTEAD:
        yield ast.Call(ast.Name(CALLED_INSTEAD[node.func.id]), node.args, node.keywords)
    if isinstance(node.func, ast.Attribute) and node.func.attr in CLEANING:
        yield node.func.value


def _chosen(node: ast.IfExp) -> Iterator[ast.AST]:
    yield node.body
    yield node.orelse


def _inverted(node: ast.UnaryOp) -> Iterator[ast.AST]:
    if isinstance(node.op, ast.Not | ast.USub):
        yield node.operand


def _picked(node: ast.Subscript) -> Iterator[ast.AST]:
    match node.slice:
        case ast.Constant(value=0):
            yield ast.Subscript(node.value, ast.Constant(-1))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            yield ast.Subscript(node.value, ast.Constant(0))
        case ast.Slice(lower, upper, step):
            yield node.value
            if lower and upper:
                yield ast.Subscript(node.value, ast.Slice(None, upper, step))


CHANGES: dict[type[ast.AST], Callable[..., Iterator[ast.AST]]] = {
    ast.Compare: _compared,
    ast.BoolOp: _joined,
    ast.BinOp: _computed,
    ast.Constant: _number,
    ast.Call: _called,
    ast.IfExp: _chosen,
    ast.UnaryOp: _inverted,
    ast.Subscript: _picked,
}


def statement_changes(node: ast.stmt) -> Iterator[tuple[ast.AST, str]]:
    """Changes of a whole statement: the node that goes, and the text in its place."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in DOING:
            yield node, "pass"
        case ast.If(test=test):
            yield test, f"not ({ast.unparse(test)})"
            if not node.orelse:
                yield test, "False"
        case ast.AugAssign(target=target, value=value):
            yield node, f"{ast.unparse(target)} = {ast.unparse(value)}"
        case ast.Continue() | ast.Break():
            yield node, "pass"


def _walk(function: ast.AST) -> Iterator[tuple[ast.stmt, ast.AST]]:
    """All expressions of a function with their statements, without annotations, messages and inner functions."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Raise | ast.arguments | ast.Assert):
            continue
        if isinstance(child, ast.stmt):
            yield child, child
            for part in ast.iter_child_nodes(child):
                annotates = isinstance(child, ast.AnnAssign) and part is child.annotation
                if isinstance(part, ast.expr | ast.withitem) and not annotates:
                    yield from ((child, inner) for inner in ast.walk(part) if isinstance(inner, ast.expr))
        yield from _walk(child)


def _spliced(text: str, node: ast.AST, instead: str) -> str:
    """The text with another text in the place of a node, whose columns count bytes."""
    lines = text.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]  # type: ignore[attr-defined]
    return b"".join([*lines[:first], before, instead.encode(), after, *lines[last + 1 :]]).decode()


def header(statement: ast.stmt) -> range:
    """The lines of a statement, without those of the statements in it."""
    inner = [child.lineno for child in ast.walk(statement) if isinstance(child, ast.stmt) and child is not statement]
    last = statement.end_lineno or statement.lineno
    return range(statement.lineno, max(statement.lineno, min(inner, default=last + 1) - 1) + 1)


def changes_of(function: ast.FunctionDef) -> dict[str, list[Change]]:
    """All changes of a function by kind: the statement, the node in it that goes, and the text in its place."""
    kinds: dict[str, list[Change]] = {}
    for statement, node in _walk(function):
        if isinstance(node, ast.stmt):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue  # a docstring
            changes = list(statement_changes(node))
        else:
            changes = [(node, f"({ast.unparse(other)})") for other in CHANGES.get(type(node), lambda _: ())(node)]
        for gone, instead in changes:
            if instead != f"({ast.unparse(gone)})":  # two equal arguments
                kinds.setdefault(type(gone).__name__, []).append((statement, gone, instead))
    return kinds


def bug_of(file: Path, function: ast.FunctionDef, text: str, rng: random.Random) -> Bug | None:
    """A bug of a function that is still Python: first a kind of change is drawn, and then a change."""
    kinds = changes_of(function)
    for kind in rng.sample(sorted(kinds), len(kinds)):
        for statement, gone, instead in rng.sample(kinds[kind], len(kinds[kind])):
            source = _spliced(text, gone, instead)
            with suppress(SyntaxError, ValueError):  # in a format of an f-string
                compile(source, str(file), "exec")
                breaks = f"{function.name}, line {gone.lineno}: {ast.unparse(gone)} -> {instead}"  # type: ignore[attr-defined]
                return Bug(str(file), breaks, header(statement), source)
    return None


def fresh_bugs(number: int, seed: int, root: Path = ROOT) -> list[Bug]:
    """At most `number` bugs, each in another function of `root`/src/lockstep; the same ones for the same seed."""
    functions = []
    for path in sorted((root / "src" / "lockstep").rglob("*.py")):
        if "template" not in path.parts:
            text = path.read_text()
            inside = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
            functions += [(path.relative_to(root), node, text) for node in inside]
    rng = random.Random(seed)
    rng.shuffle(functions)
    bugs: list[Bug] = []
    for file, function, text in functions:
        if bug := bug_of(file, function, text, rng):
            bugs.append(bug)
        if len(bugs) == number:
            break
    return bugs
