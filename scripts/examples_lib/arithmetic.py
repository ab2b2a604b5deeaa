"""Arithmetic in what a model wrote, checked without executing anything but arithmetic."""

import ast
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import cast

LONGEST = 200  # characters of an equation
LARGEST = 10**6  # number in a function

_PIECE = r"(?:\d+[a-z]?(?![A-Za-z])|(?<![A-Za-z0-9])[a-z](?![A-Za-z])|[-+*×·()]|[ \t])"
_EQUATION = re.compile(rf"{_PIECE}+(?:={_PIECE}+)+")
_TIMES = re.compile(r"(?<=[\da-z)])\s*(?=\()|(?<=\d)(?=[a-z])|(?<=\))\s*(?=[\da-z])")
_PLAIN = (ast.Add, ast.Sub, ast.Mult, ast.UAdd, ast.USub)
_VALUES = (3, 8, 21, 55)  # of variables, in turn

_STATEMENTS = (ast.If, ast.Return, ast.BoolOp, ast.And, ast.Or, ast.Not, ast.Compare, ast.IfExp, ast.UnaryOp, ast.BinOp)
_OPERATORS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Mod, ast.FloorDiv, ast.Load, ast.Name)


def wrong_equations(text: str) -> list[str]:
    """Equations in ``text`` that do not hold: sums and products of numbers and single letters.

    Those whose sides have different letters are definitions, and say nothing that could be wrong.
    """
    found = []
    for match in _EQUATION.finditer(text):
        sides = [side for side in map(_expression, match[0].split("=")) if side is not None]
        wrong = any(
            _letters(left) == _letters(right) and _value(left) != _value(right) for left, right in pairwise(sides)
        )
        if wrong:
            found.append(" ".join(match[0].split()))
    return found


def _expression(text: str) -> ast.expr | None:
    text = _TIMES.sub("*", text.strip().replace("×", "*").replace("·", "*"))
    try:
        found = ast.parse(text, mode="eval").body if len(text) <= LONGEST else None
    except (SyntaxError, ValueError):
        return None
    return found


def _letters(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def _value(expression: ast.expr) -> tuple[int, ...] | None:
    """With several values of its letters; None for what is no arithmetic."""
    letters = sorted(_letters(expression))
    settings = [{name: _VALUES[(i + place) % 4] for i, name in enumerate(letters)} for place in range(len(_VALUES))]
    try:
        return tuple(_evaluate(expression, setting) for setting in settings)
    except TypeError:
        return None


def _evaluate(node: ast.expr, letters: dict[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return letters[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _evaluate(operand, letters)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _PLAIN):
            a, b = _evaluate(left, letters), _evaluate(right, letters)
            return a + b if isinstance(op, ast.Add) else a - b if isinstance(op, ast.Sub) else a * b
    raise TypeError(ast.dump(node))


class NotArithmetic(ValueError):
    """A function that does more than compare and compute; it is not executed."""


def values(code: str, name: str, arguments: list[int]) -> list[object]:
    """What function ``name`` of one argument returns.

    Raises:
        NotArithmetic: the code has anything but comparisons, conditions and arithmetic of small numbers in it.
        SyntaxError, ValueError: it is no Python.
    """
    tree = ast.parse(code)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not functions:
        raise NotArithmetic(f"there is no function {name}")
    function = functions[-1]
    if len(function.args.args) != 1 or function.decorator_list or function.args.defaults:
        raise NotArithmetic(f"{name} does not take one argument")
    function.returns = function.args.args[0].annotation = None
    for node in _inside(function):
        number = isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) <= LARGEST
        if not number and not isinstance(node, (*_PLAIN, *_STATEMENTS, *_OPERATORS)):
            raise NotArithmetic(f"{name} does more than compute: {type(node).__name__}")
    space: dict[str, object] = {"__builtins__": {}}
    exec(compile(ast.Module([function], []), "<answer>", "exec"), space)  # noqa: S102 - only what was let through above
    called = cast("Callable[[int], object]", space[name])
    return [_called(called, argument) for argument in arguments]


def _called(function: Callable[[int], object], argument: int) -> object:
    try:
        return function(argument)
    except (ArithmeticError, NameError) as error:
        return repr(error)


def _inside(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """All nodes of its body but a docstring."""
    for statement in function.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a string that is not used
        yield from ast.walk(statement)
