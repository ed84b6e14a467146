"""Small mistakes in a lesson's solution, one at a time: a statement removed, two swapped, an operator changed."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.tools.course.lessons import Lesson

_OTHER_OPERATOR: dict[type[ast.AST], type[Any]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Lt: ast.LtE, ast.LtE: ast.Lt},
}
_Edit = Callable[[Any], None]  # changes a node in place


@dataclass(frozen=True)
class Mutant:
    lesson: Lesson
    function: str  # or the changed constant
    change: str  # "drop optimizer.step()"; with a number if the same change fits in several places
    source: str

    @property
    def name(self) -> str:
        return f"{self.lesson.number} {self.function}: {self.change}"


def find_mutants(lesson: Lesson) -> Iterator[Mutant]:
    """All mutants of a solution in Python, in the order of its lines."""
    tree = ast.parse(lesson.solution.read_text())
    seen: dict[str, int] = {}
    for place, part in enumerate(tree.body):
        if not isinstance(part, ast.FunctionDef | ast.Assign):
            continue
        function = part.name if isinstance(part, ast.FunctionDef) else ast.unparse(part.targets[0])
        if function in ("State", "Batches"):  # names of types
            continue
        in_messages = {
            id(inner) for node in ast.walk(part) if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)
        }
        names = _stored_names(part)
        for number, node in enumerate(ast.walk(part)):
            for change, edit in [] if id(node) in in_messages else _edits(node):
                mutated = copy.deepcopy(tree)
                edit(list(ast.walk(mutated.body[place]))[number])
                if _find_unbound(mutated.body[place], set(names)):
                    continue  # Python itself refuses it, with a NameError
                name = f"{function}: {change}"
                seen[name] = seen.get(name, 0) + 1
                label = change if seen[name] == 1 else f"{change} ({seen[name]})"
                yield Mutant(lesson, function, label, ast.unparse(ast.fix_missing_locations(mutated)) + "\n")


def _edits(node: ast.AST) -> Iterator[tuple[str, _Edit]]:
    """The possible changes of this node, each with a description."""
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(node, name, None)
        if isinstance(statements, list):
            yield from _edit_statements(name, statements)
    if isinstance(node, ast.FunctionDef):
        for decorator in node.decorator_list:
            yield f"drop @{ast.unparse(decorator)}", lambda found: found.decorator_list.clear()
    if isinstance(node, ast.BinOp) and type(node.op) in _OTHER_OPERATOR and not _is_text(node.right):
        yield from _edit_operator(node, "op", node.op)
    if isinstance(node, ast.Compare):
        yield from _edit_operator(node, "ops", node.ops[0])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"drop not in {ast.unparse(node)}", lambda found: _become(found, found.operand)
    if isinstance(node, ast.IfExp):
        yield f"exchange branches of {ast.unparse(node)}", _exchange_branches
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        other = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{node.value} becomes {other}", lambda found: setattr(found, "value", other)
    if isinstance(node, ast.Call):
        for index, keyword in enumerate(node.keywords):
            yield (
                f"drop {ast.unparse(keyword)} in {ast.unparse(node.func)}",
                partial(_drop_keyword, index),
            )


def _edit_statements(name: str, statements: list[ast.stmt]) -> Iterator[tuple[str, _Edit]]:
    for index, statement in enumerate(statements):
        if isinstance(statement, ast.Return | ast.Raise | ast.Pass) or _is_docstring(statement):
            continue
        title = ast.unparse(statement).splitlines()[0]

        def drop(found: Any, index: int = index) -> None:
            getattr(found, name)[index] = ast.Pass()

        yield f"drop {title}", drop
        if isinstance(statement, ast.If):

            def unwrap(found: Any, index: int = index) -> None:
                getattr(found, name)[index : index + 1] = getattr(found, name)[index].body

            yield f"always {title}", unwrap
        following = statements[index + 1] if index + 1 < len(statements) else None
        if following is not None and not isinstance(following, ast.Return):

            def exchange(found: Any, index: int = index) -> None:
                both = getattr(found, name)
                both[index], both[index + 1] = both[index + 1], both[index]

            yield f"{ast.unparse(following).splitlines()[0]} before {title}", exchange


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _stored_names(part: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(part) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _find_unbound(node: ast.AST, waiting: set[str]) -> bool:
    """Whether a local name is used before it has a value. `waiting`: the names without a value."""
    if isinstance(node, ast.arg):
        waiting.discard(node.arg)
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store):
            waiting.discard(node.id)
        return node.id in waiting
    parts: list[Any] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Assign):
        parts = [node.value, *node.targets]
    elif isinstance(node, ast.For):
        parts = [node.iter, node.target, *node.body]
    elif isinstance(node, ast.ListComp):
        parts = [*node.generators, node.elt]
    elif isinstance(node, ast.DictComp):
        parts = [*node.generators, node.key, node.value]
    elif isinstance(node, ast.comprehension):
        parts = [node.iter, node.target, *node.ifs]
    return any(_find_unbound(part, waiting) for part in parts)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _edit_operator(node: ast.AST, name: str, operator: ast.AST) -> Iterator[tuple[str, _Edit]]:
    other = _OTHER_OPERATOR[type(operator)]()
    mutated = copy.deepcopy(node)
    setattr(mutated, name, [other] if name == "ops" else other)
    change = f"{ast.unparse(node)} becomes {ast.unparse(mutated)}"
    yield change, lambda found: setattr(found, name, [other] if name == "ops" else other)


def _drop_keyword(index: int, call: Any) -> None:
    call.keywords.pop(index)


def _become(node: ast.AST, other: ast.AST) -> None:
    node.__class__ = other.__class__  # type: ignore[misc]
    node.__dict__.update(other.__dict__)


def _exchange_branches(node: Any) -> None:
    node.body, node.orelse = node.orelse, node.body
