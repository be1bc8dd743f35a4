"""Small faults for bench/mutants: each is one edit of a function's text, which leaves all other lines where they are."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
NEGATED_BY_FLIPPING = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
}
BOOLEANS: dict[type[ast.boolop], tuple[str, str]] = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
EXTREMES = {"min": "max", "max": "min"}

WITHOUT_CODE = {"returns", "annotation", "decorator_list", "type_comment", "type_params"}
"""Fields of the syntax tree in which nothing is changed."""
WITHOUT_EFFECT = {"strict", "flush", "non_blocking", "pin_memory", "stacklevel", "indent", "daemon", "exist_ok", "ignore_errors"}
"""Arguments by name that change no result on a CPU: of checks of our own (`strict` of zip), of messages, of speed."""
WITHOUT_TRACE = {"os.close", "os.fsync", "gc.collect"}
"""Calls whose absence shows when power fails, or after very long runs."""
FOR_PEOPLE = {"__repr__", "__str__"}
PLAIN = "return"
"""Of None in place of a value: short functions have no other edit, and most callers stumble over it."""
PLAIN_WEIGHT = 0.25
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
ShortStatement: TypeAlias = ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return


@dataclass(frozen=True, order=True)
class Edit:
    """One change of a file: the bytes from `begin` to `end` become `text`."""

    operator: str
    begin: int
    end: int
    text: str


@dataclass(frozen=True)
class Function:
    """A function or method, and all edits of its own code; those of functions inside it are theirs."""

    name: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Source:
    """The bytes of a file, and where a node of its syntax tree lies among them."""

    content: bytes
    starts: tuple[int, ...]
    """Of each line."""

    def begin(self, node: ast.expr | ast.stmt) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.end_lineno - 1] + node.end_col_offset


def read_source(content: bytes) -> Source:
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return Source(content, tuple(starts))


def apply(content: bytes, edit: Edit) -> bytes:
    return content[: edit.begin] + edit.text.encode() + content[edit.end :]


def is_valid(content: bytes, edit: Edit) -> bool:
    """Say whether the changed file is Python, and other Python than before."""
    try:
        return ast.dump(ast.parse(apply(content, edit))) != ast.dump(ast.parse(content))
    except SyntaxError:
        return False


def shown(content: bytes, edit: Edit) -> tuple[str, str]:
    """Show the lines of the edit before and after, each joined to one."""
    first = content.rfind(b"\n", 0, edit.begin) + 1
    last = (content + b"\n").index(b"\n", edit.end)
    after = content[first : edit.begin] + edit.text.encode() + content[edit.end : last]
    return _joined(content[first:last]), _joined(after)


def _joined(lines: bytes) -> str:
    return " ".join(lines.decode().split())


# --- drawing ------------------------------------------------------------------------------------------------------------


def draw(files: Sequence[tuple[str, bytes]], count: int, seed: str) -> list[tuple[str, Function, Edit]]:
    """Draw at most `count` edits, each of another function until all have had one; fewer draws are the first of more."""
    chance = random.Random(seed)
    contents = dict(files)
    left = [(name, function, list(function.edits)) for name, content in files for function in functions_of(content)]
    drawn: list[tuple[str, Function, Edit]] = []
    while left:
        # By weight, without replacement (Efraimidis and Spirakis 2006): plain functions come later, as a rule.
        left.sort(key=lambda one: chance.random() ** (1 / max(weight_of(edit.operator) for edit in one[2])), reverse=True)
        for name, function, edits in left:
            edit = _draw_valid(contents[name], edits, chance)
            if edit is not None:
                drawn.append((name, function, edit))
            if len(drawn) == count:
                return drawn
        left = [one for one in left if one[2]]
    return drawn


def weight_of(operator: str) -> float:
    return PLAIN_WEIGHT if operator == PLAIN else 1.0


def _draw_valid(content: bytes, edits: list[Edit], chance: random.Random) -> Edit | None:
    """Take one out of those that are left. Its kind is drawn before its place: else kinds with many places are all there is."""
    while edits:
        operators = sorted({edit.operator for edit in edits})
        (operator,) = chance.choices(operators, [weight_of(one) for one in operators])
        edit = chance.choice([edit for edit in edits if edit.operator == operator])
        edits.remove(edit)
        if is_valid(content, edit):
            return edit
    return None


# --- what may be changed ------------------------------------------------------------------------------------------------


def functions_of(content: bytes) -> list[Function]:
    """List the functions of a file that have something to change, in its order."""
    source, found = read_source(content), []
    for name, node in _definitions(ast.parse(content), ""):
        edits = [edit for child in _changeable(node) for edit in _edits_of(child, node, source)]
        if edits:
            found.append(Function(name, tuple(sorted(edits))))
    return found


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, SCOPES):
            name = prefix + child.name
            if not isinstance(child, ast.ClassDef) and child.name not in FOR_PEOPLE and not _is_stub(child):
                yield name, child
            yield from _definitions(child, name + ".")
        elif not _is_for_types(child):
            yield from _definitions(child, prefix)


def _is_stub(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Say whether there is no code inside: of a protocol, or of an abstract class."""
    return all(isinstance(one, (ast.Pass, ast.Raise)) or _is_text(one) for one in node.body)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _changeable(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through what lies inside, without types, texts, errors and code for a GPU; of a message only its call is given."""
    for child in _children(node):
        if _is_left_alone(child):
            continue
        yield child
        if not _is_message(child):
            yield from _changeable(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name not in WITHOUT_CODE:
            values = value if isinstance(value, list) else [value]
            yield from (one for one in _reached(values) if isinstance(one, ast.AST))


def _reached(values: list[object]) -> Iterator[object]:
    """Leave out what follows `if ... == "cpu": return`, which no test on a CPU reaches."""
    for value in values:
        yield value
        if isinstance(value, ast.If) and "== 'cpu'" in ast.unparse(value.test) and isinstance(value.body[-1], ast.Return):
            return


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, (*SCOPES, ast.Raise, ast.Assert, ast.JoinedStr)) or _is_for_types(node):
        return True
    if isinstance(node, ast.keyword):
        return node.arg in WITHOUT_EFFECT
    if isinstance(node, (ast.If, ast.IfExp)):
        return _mentions(node.test, "cuda")
    return isinstance(node, ShortStatement) and _mentions(node, "cuda")


def _mentions(node: ast.AST, word: str) -> bool:
    names = (getattr(one, "id", None) or getattr(one, "attr", None) or getattr(one, "value", None) for one in ast.walk(node))
    return any(isinstance(name, str) and word in name for name in names)


def _is_message(node: ast.AST) -> bool:
    """Say whether a statement holds a text for people: one with a blank between words."""
    if not isinstance(node, ShortStatement):
        return False
    texts = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))
    return any(re.search(r"\w.* | .*\w", text) for text in texts)


# --- the operators ------------------------------------------------------------------------------------------------------


def _edits_of(node: ast.AST, function: ast.FunctionDef | ast.AsyncFunctionDef, source: Source) -> Iterator[Edit]:
    for operator in OPERATORS:
        yield from operator(node, source)
    if isinstance(node, ast.Return) and not _is_message(node):
        yield from _return_none(node, function, source)
    if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign)):
        yield from _remove(node, function, source)


def _replace_between(
    operator: str, left: ast.expr, right: ast.expr | ast.stmt, words: tuple[str, str], source: Source
) -> Iterator[Edit]:
    """Replace the first of `words` by the second, in the text between two nodes."""
    begin = source.end(left)
    gap = source.content[begin : source.begin(right)]
    before, after = words
    found = re.search(r"\s+".join(map(re.escape, before.split())).encode(), gap)
    if found is not None and b"#" not in gap:
        yield Edit(operator, begin + found.start(), begin + found.end(), after)


def _flip_comparison(node: ast.AST, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        for left, op, right in zip(sides, node.ops, node.comparators, strict=False):
            yield from _replace_between("comparison", left, right, COMPARISONS[type(op)], source)


def _swap_arithmetic(node: ast.AST, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _joins_texts(node):
        yield from _replace_between("arithmetic", node.left, node.right, ARITHMETIC[type(node.op)], source)
    if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC and not _is_text_like(node.value):
        before, after = ARITHMETIC[type(node.op)]
        yield from _replace_between("arithmetic", node.target, node.value, (before + "=", after + "="), source)


def _joins_texts(node: ast.BinOp) -> bool:
    """Say whether texts are joined, or parts of a path: no other arithmetic is possible with them."""
    if isinstance(node.op, ast.Div) and re.search("folder|directory|path|aside", ast.unparse(node)):
        return True
    return any(_joins_texts(one) if isinstance(one, ast.BinOp) else _is_text_like(one) for one in (node.left, node.right))


def _is_text_like(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


def _swap_boolean(node: ast.AST, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.BoolOp):
        yield from _replace_between("boolean", node.values[0], node.values[1], BOOLEANS[type(node.op)], source)


def _drop_not(node: ast.AST, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        begin = source.begin(node)
        yield Edit("not", begin, begin + len("not "), "")


def _negate_condition(node: ast.AST, source: Source) -> Iterator[Edit]:
    if not isinstance(node, (ast.If, ast.IfExp)):
        return
    test = node.test
    is_flipped = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], NEGATED_BY_FLIPPING)
    if not is_flipped and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
        begin, end = source.begin(test), source.end(test)
        yield Edit("condition", begin, end, f"not ({source.content[begin:end].decode()})")


def _change_constant(node: ast.AST, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield Edit("truth", source.begin(node), source.end(node), str(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield Edit("integer", source.begin(node), source.end(node), str(node.value + 1))


def _swap_extreme(node: ast.AST, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.Name) and node.id in EXTREMES:
        yield Edit("extreme", source.begin(node), source.end(node), EXTREMES[node.id])


OPERATORS: tuple[Callable[[ast.AST, Source], Iterator[Edit]], ...] = (
    _flip_comparison,
    _swap_arithmetic,
    _swap_boolean,
    _drop_not,
    _negate_condition,
    _change_constant,
    _swap_extreme,
)


def _return_none(node: ast.Return, function: ast.FunctionDef | ast.AsyncFunctionDef, source: Source) -> Iterator[Edit]:
    """Return None, but not from a generator, and not where None may be returned; nor for False, which is too near to it."""
    if node.value is None or function.returns is None or _may_be_none(function.returns):
        return
    if not isinstance(node.value, ast.Constant) or node.value.value not in (False, None):
        yield _in_place_of(PLAIN, node, "return None", source)


def _may_be_none(annotation: ast.expr) -> bool:
    text = ast.unparse(annotation)
    return any(word in text for word in ("None", "Optional", "NoReturn", "Iterator", "Generator"))


def _remove(
    node: ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign,
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    source: Source,
) -> Iterator[Edit]:
    """Remove a call, or an assignment to attributes; not in __init__, whose attributes would not be there at all."""
    if isinstance(node, ast.Expr):
        is_removable = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) not in WITHOUT_TRACE
    else:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        is_removable = function.name != "__init__" and all(map(_is_attribute, targets))
    if is_removable:
        yield _in_place_of("removed", node, "pass", source)


def _is_attribute(target: ast.expr) -> bool:
    return all(map(_is_attribute, target.elts)) if isinstance(target, ast.Tuple) else isinstance(target, ast.Attribute)


def _in_place_of(operator: str, node: ast.stmt, text: str, source: Source) -> Edit:
    """Replace a statement, and keep as many line ends as it had."""
    begin, end = source.begin(node), source.end(node)
    return Edit(operator, begin, end, text + "\n" * source.content.count(b"\n", begin, end))
