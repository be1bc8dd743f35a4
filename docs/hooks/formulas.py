"""Typeset formulas: a fenced block of the language `formula` becomes MathML, which browsers draw without a network.

Each line is `name = expression`, written as in Python with |p| for a norm, ^ for a power, @ for a product of matrices and M.T for
a transposed one, and after two blanks a note.
"""

from __future__ import annotations

import ast
import html
import re
from typing import Any

BLOCK = re.compile(r"^```formula\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NORM = re.compile(r"\|(\w+)\|")
GREEK = {"alpha": "α", "beta": "β", "eps": "ε", "epsilon": "ε", "mu": "μ"}
SIGNS: dict[type[ast.AST], str] = {ast.Add: "+", ast.Sub: "−", ast.Mult: "·", ast.MatMult: "&#x2062;"}
RANKS: dict[type[ast.AST], int] = {ast.Add: 1, ast.Sub: 1, ast.Mult: 2, ast.MatMult: 2}
"""How tightly an operator binds; a fraction and a power need no brackets around them."""


def typeset(block: str) -> str:
    """Return the lines of a block as a table of MathML, with their notes beside them."""
    rows = [_row(*_parts(line)) for line in block.strip().splitlines()]
    return f'<table class="formulas">{"".join(rows)}</table>'


def _parts(line: str) -> tuple[str, str, str]:
    """Return name, expression and note of a line."""
    name, _, rest = line.strip().partition("=")
    expression, *note = re.split(r"\s{2,}", rest.strip(), maxsplit=1)
    return name.strip(), expression, note[0] if note else ""


def _row(name: str, expression: str, note: str) -> str:
    math = f'<math displaystyle="true"><mrow>{mathml(name)}<mo>=</mo>{mathml(expression)}</mrow></math>'
    return f"<tr><td>{math}</td><td>{html.escape(note)}</td></tr>"


def mathml(text: str) -> str:
    """Return an expression as MathML."""
    return _node(ast.parse(NORM.sub(r"norm(\1)", text).replace("^", "**"), mode="eval").body)


def _node(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return f"<mn>{node.value}</mn>"
    if isinstance(node, ast.Name):
        return _name(node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        inner = "<mo>,</mo>".join(map(_node, node.args))
        if node.func.id == "sqrt":
            return f"<msqrt>{inner}</msqrt>"
        if node.func.id == "sum":
            return f"<mrow><mo>∑</mo>{_within(node.args[0], 2)}</mrow>"
        if node.func.id == "ceil":
            return f"<mrow><mo>⌈</mo>{inner}<mo>⌉</mo></mrow>"
        if node.func.id == "norm":
            return f"<mrow><mo>‖</mo>{inner}<mo>‖</mo></mrow>"
        return f"<mrow>{_name(node.func.id)}<mo>(</mo>{inner}<mo>)</mo></mrow>"
    if isinstance(node, ast.Attribute) and node.attr == "T":
        return f"<msup>{_within(node.value, 3)}<mo>⊤</mo></msup>"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return f"<mfrac>{_node(node.left)}{_node(node.right)}</mfrac>"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return f"<msup>{_within(node.left, 3)}{_node(node.right)}</msup>"
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        rank = RANKS[type(node.op)]
        right = _within(node.right, rank + isinstance(node.op, ast.Sub))
        return f"<mrow>{_within(node.left, rank)}<mo>{SIGNS[type(node.op)]}</mo>{right}</mrow>"
    raise ValueError(f"a formula holds what cannot be typeset: {ast.unparse(node)}")


def _within(node: ast.expr, rank: int) -> str:
    """Return an operand, in brackets where it binds less tightly than what is around it."""
    loose = isinstance(node, ast.BinOp) and RANKS.get(type(node.op), rank) < rank
    return f"<mrow><mo>(</mo>{_node(node)}<mo>)</mo></mrow>" if loose else _node(node)


def _name(name: str) -> str:
    letters, digits = re.fullmatch(r"(.*?)(\d*)", name).groups()  # type: ignore[union-attr]
    shown = GREEK.get(letters, letters)
    base = f"<mi>{html.escape(shown)}</mi>"
    return f"<msub>{base}<mn>{digits}</mn></msub>" if digits else base


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    return BLOCK.sub(lambda block: typeset(block[1]), markdown)
