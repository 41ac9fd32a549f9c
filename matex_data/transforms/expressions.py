"""Expressions of fields, parsed: conditions of ``where=``, fields of ``derive=``, sample weights.

An expression is a Python expression of field names, numbers, ``+ - * / // % **``, comparisons, ``& | ~`` and the
functions of `FUNCTIONS`. A name that is no Python identifier stands in backticks, as in ``pandas.DataFrame.query``:
```jets/pt` > 30``; `quote_paths` puts there what can only be the name of a field. `REDUCTIONS` make one number for each
sample of all numbers of the sample, ``Jet_pt[0]`` takes one of them, and ``Jet_pt[Jet_eta < 2.5]`` those for which a
condition is true. Fields of texts and categories are compared with a text by ``==``, ``!=`` and ``in``. ``nan`` is a
missing number.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from keyword import kwlist
from typing import Any
from unicodedata import normalize

import numpy as np

from matex_data.errors import FormatError, near_matches
from matex_data.fields import MISSING_INTEGER, Schema, is_category
from matex_data.readers.dimensions.cf import TimeOrigin, time_origin

REDUCTIONS = ("sum", "count", "min", "max", "mean", "any", "all")
"""Functions of one argument that has several numbers for each sample."""
FUNCTIONS = {"where": 3, "arctan2": 2} | dict.fromkeys(
    (
        *("abs", "sqrt", "exp", "expm1", "log", "log10", "log1p", "floor", "ceil"),
        *("sin", "cos", "tan", "arcsin", "arccos", "arctan"),
        *("sinh", "cosh", "tanh", "arcsinh", "arccosh", "arctanh"),
    ),
    1,
)
"""Functions of NumPy that yield a number for each number, and how many arguments they take."""
TIMES = ("year", "month", "day", "hour", "dayofyear")
"""Functions of a field of times, by its units and calendar."""
NAN = "nan"
KEYWORDS = set(kwlist) - {"and", "or", "not"}  # of Python, which are names of columns, such as class
REMEDY = {
    "where=": "combine comparisons with & | ~ and parentheses: ({0} > 30) & ({1} < 40); "
    "reduce several numbers of a sample to one: max({0}) > 30, count({0} > 30) >= 2",
    "derive=": "use field names, numbers, operators and functions: log({0}), sum({0}), ({0} > 30) & ({1} < 40)",
    "weights=": "use field names, numbers, operators and functions: {0} * {1}",
}
"""By option: what helps, with the names of two fields."""
NO_FIELDS = {*REDUCTIONS, *FUNCTIONS, *TIMES, NAN, *kwlist}


@dataclass(frozen=True)
class Numbers:
    """Field of numbers in an expression.

    Parameters
    ----------
    name : of the field.
    """

    name: str


@dataclass(frozen=True)
class TextTest:
    """Comparison of a field of texts or categories with a text: True for those that are equal.

    Parameters
    ----------
    name : of the field.
    value : the text; of categories the code, or None for the name of no category.
    """

    name: str
    value: str | int | None


@dataclass(frozen=True)
class TimePart:
    """Number in the date of a time.

    Parameters
    ----------
    name : of the field.
    part : one of ``TIMES``.
    origin : of the times, once the field is known.
    """

    name: str
    part: str
    origin: TimeOrigin | None = None


@dataclass(frozen=True)
class OfExpressions:
    """Operand that is made of expressions of several numbers for each sample.

    Parameters
    ----------
    arguments : the expressions, the numbers first.
    """

    arguments: tuple[Expression, ...]

    @property
    def argument(self) -> Expression:
        """Expression of the numbers."""
        return self.arguments[0]


@dataclass(frozen=True)
class Reduction(OfExpressions):
    """One number for each sample, made of several ones.

    Parameters
    ----------
    function : one of ``REDUCTIONS``.
    """

    function: str


@dataclass(frozen=True)
class Element(OfExpressions):
    """One of the numbers of each sample.

    Parameters
    ----------
    number : position, from 0 on; negative: from the end.
    """

    number: int


class Elements(OfExpressions):
    """Those of the numbers of each sample for which a condition, the second argument, is true."""


OfField = Numbers | TextTest | TimePart
Operand = OfField | OfExpressions


@dataclass(frozen=True)
class Expression:
    """Parsed expression.

    Parameters
    ----------
    option : for which the user wrote it, such as ``"where="``, for errors.
    text : as the user wrote it.
    code : the expression with variables in place of its operands.
    operands : the operand that each variable of ``code`` stands for.
    """

    option: str
    text: str
    code: str
    operands: Mapping[str, Operand]

    @property
    def fields(self) -> list[str]:
        """Names of all fields, those in arguments too, without duplicates."""
        return self._names(OfField, lambda argument: argument.fields)

    @property
    def outside(self) -> list[str]:
        """Names of the fields that are in no arguments."""
        return self._names(OfField, lambda _: [])

    @property
    def numbers(self) -> list[str]:
        """Names of the fields whose numbers are used, without those that are compared with texts."""
        return self._names(Numbers, lambda argument: argument.numbers)

    def _names(self, kind: Any, of_argument: Callable[[Expression], list[str]]) -> list[str]:
        """Return the names of the fields of operands of this kind, and those of arguments, without duplicates."""
        names: dict[str, None] = {}
        for operand in self.operands.values():
            if isinstance(operand, OfExpressions):
                names.update(dict.fromkeys(name for argument in operand.arguments for name in of_argument(argument)))
            elif isinstance(operand, kind):
                names[operand.name] = None
        return list(names)

    def quoted(self, is_field: Callable[[str], bool]) -> Expression:
        """Return the expression with names that have slashes in backticks; see `quote_paths`."""
        text = quote_paths(self.text, self.option, is_field)
        return self if text == self.text else parse(text, self.option)

    def bound(self, fields: Schema) -> Expression:
        """Return the expression for these fields: with codes of categories, units of times, and rounded comparisons.

        Raises
        ------
        FormatError : a field has integers with missing values, for which there is no NaN, codes that stand for other
            numbers, or no times.
        """
        operands = {variable: self._bound(operand, fields) for variable, operand in self.operands.items()}
        tree = ast.parse(self.code, mode="eval")
        for comparison in (node for node in ast.walk(tree) if isinstance(node, ast.Compare)):
            names = {node.id for node in ast.walk(comparison) if isinstance(node, ast.Name)}
            rounded = _narrow_floats([self.operands[name] for name in names & self.operands.keys()], fields)
            if rounded:
                sides = (comparison.left, comparison.comparators[0])
                comparison.left, comparison.comparators[0] = (ast.Call(ast.Name(rounded), [side], []) for side in sides)
        return replace(self, code=ast.unparse(tree), operands=operands)

    def _bound(self, operand: Operand, fields: Schema) -> Operand:
        if isinstance(operand, OfExpressions):
            return replace(operand, arguments=tuple(argument.bound(fields) for argument in operand.arguments))
        name, field = operand.name, fields.get(operand.name)
        if field is None:
            return operand
        known = field.attributes
        categories: Sequence[str] = known["categories"] if is_category(field) else ()
        if isinstance(operand, Numbers):
            if MISSING_INTEGER in known:
                held = "integers that float64 cannot hold, of which one stands for missing values"
                raise self.error(held, field=name, expected="numbers without missing values, or floats")
            if _stand_for_others(categories):
                remedy = f"compare the field with texts: `{name}` == {categories[0]!r}, `{name}` in {categories[:2]}"
                raise self.error("codes that stand for other numbers", field=name, expected="texts", remedy=remedy)
        elif isinstance(operand, TimePart):
            origin = time_origin(known.get("units"), known.get("calendar"))
            if origin is None:
                held = f"a field of units {known['units']!r}" if known.get("units") else "a field without units"
                raise self.error(held, field=name, expected="times, such as seconds since 1970-01-01")
            return replace(operand, origin=origin)
        elif is_category(field) and isinstance(operand.value, str):
            codes = {str(category): code for code, category in enumerate(categories)}
            return replace(operand, value=codes.get(operand.value, None if operand.value else -1))  # -1 is missing
        return operand

    def error(
        self, found: object, *, field: str | None = None, expected: str | None = None, remedy: str | None = None
    ) -> FormatError:
        """Return the error of an expression that cannot be evaluated."""
        wanted = "one truth value for each sample" if self.option == "where=" else "an expression of fields"
        return FormatError(
            f"{self.option} has an expression that cannot be evaluated: {self.text!r}",
            field=field,
            expected=expected or wanted,
            found=found,
            remedy=remedy or REMEDY[self.option].format(*self.examples),
        )

    @property
    def examples(self) -> tuple[str, str]:
        """Two names of fields for examples: those of the expression, whether or not it can be parsed."""
        words = re.findall(r"`[^`]+`|[^\W\d]\w*\b(?!\s*\()", re.sub(_TEXT, "", str(self.text)))
        names = list(dict.fromkeys(word for word in words if word not in NO_FIELDS)) or ["x", "y"]
        return names[0], names[-1] if len(names) < 2 else names[1]


def _narrow_floats(operands: Iterable[Operand], fields: Schema) -> str:
    """Return the name of the floats of fewer than 64 bits in which NumPy has numbers of these operands; else ""."""
    of_operands = [one.argument.numbers if isinstance(one, OfExpressions) else [one.name] for one in operands]
    dtypes = {fields[name].dtype for names in of_operands for name in names if name in fields}
    common = np.result_type(*dtypes) if dtypes and all(dtype.kind in "biuf" for dtype in dtypes) else np.dtype(bool)
    return common.name if common.kind == "f" and common.itemsize < 8 else ""


def _stand_for_others(categories: Sequence[str]) -> bool:
    """Return whether a category is a number, or truth value, other than its code.

    >>> _stand_for_others(["10", "20"]), _stand_for_others(["0", "1", "many"]), _stand_for_others(["False", "True"])
    (True, False, False)
    """
    for code, category in enumerate(categories):
        with suppress(ValueError):
            if float({"False": "0", "True": "1"}.get(category, category)) != code:
                return True
    return False


def parse(text: str, option: str = "where=") -> Expression:
    """Parse an expression; nothing is evaluated.

    Parameters
    ----------
    text : the expression.
    option : for which the user wrote it.

    Raises
    ------
    FormatError : it is no expression, or names no field.

    Examples
    --------
    >>> parse("(`jets/pt` > 30) & (MET < 4)").fields
    ['jets/pt', 'MET']
    >>> expression = parse("count(Jet_pt > 30) >= 2")
    >>> expression.code, expression.fields
    ('operand_0 >= 2', ['Jet_pt'])
    """
    quoted: dict[str, str] = {}

    def variable(found: re.Match[str]) -> str:
        field = found["quoted"] or found["word"]
        if field is None or (found["word"] and normalize("NFKC", field) == field):
            return found[0]
        name = f"quoted_{len(quoted)}"
        while name in text:
            name += "_"
        quoted[name] = field
        return f" {name} "

    whole = Expression(option, text, "", {})
    if not isinstance(text, str):
        raise whole.error(f"{type(text).__name__}")
    try:
        tree = ast.parse(_NAMES.sub(variable, text).strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        keywords = [word for word in re.findall(r"\w+", text) if word in KEYWORDS]
        hint = f"; a field of the name {keywords[0]!r} stands in backticks: `{keywords[0]}`" if keywords else ""
        raise whole.error(f"{error}{hint}") from error
    _check_syntax(whole, tree)
    return _level(whole, quoted, tree.body)


_TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_NAMES = re.compile(rf"{_TEXT}|`(?P<quoted>[^`]+)`|(?P<word>[^\W\d]\w*)")  # of words Python has the NFKC form
_PATHS = re.compile(rf"`[^`]*`|{_TEXT}|(?<![\w.])(?P<path>[^\W\d]\w*(?:/\w+)+)\b(?!\s*\()")


def quote_paths(text: str, option: str, is_field: Callable[[str], bool]) -> str:
    """Return an expression with backticks around the names with slashes that are fields; ``a / b`` is a division.

    Parameters
    ----------
    text : the expression.
    option : for which the user wrote it.
    is_field : whether there is a field of this name.

    Raises
    ------
    FormatError : a name may as well be a division of fields.

    Examples
    --------
    >>> quote_paths("beam/energy > 9 * pt/mass", "where=", {"beam/energy", "pt", "mass"}.__contains__)
    '`beam/energy` > 9 * pt/mass'
    """

    def quoted(word: re.Match[str]) -> str:
        path = word["path"]
        meanings = _meanings(path.split("/"), is_field) if path and any(map(is_field, _joined(path))) else []
        written = ["/".join(f"`{name}`" if "/" in name else name for name in names) for names in meanings]
        if len(written) > 1:
            raise FormatError(
                f"{option} has an expression with two meanings: {text!r}",
                field=path,
                expected="names of fields in backticks, and spaces around divisions",
                found=" or ".join(written),
                remedy=f"write `{path}` for the field, and {path.replace('/', ' / ')} for the division",
            )
        return written[0] if written else word[0]

    return _PATHS.sub(quoted, text) if isinstance(text, str) else text


def _joined(path: str) -> Iterator[str]:
    """Yield the names with slashes that are within a path."""
    parts = path.split("/")
    for begin, stop in itertools.combinations(range(len(parts) + 1), 2):
        if stop - begin > 1:
            yield "/".join(parts[begin:stop])


def _meanings(parts: Sequence[str], is_field: Callable[[str], bool]) -> list[tuple[str, ...]]:
    """Return the ways to divide the parts of a path into names of fields, and numbers."""
    if not parts:
        return [()]
    names = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    known = [name for name in names if name.isdecimal() or is_field(name)]
    return [(name, *rest) for name in known for rest in _meanings(parts[name.count("/") + 1 :], is_field)]


def _level(whole: Expression, quoted: Mapping[str, str], tree: ast.expr) -> Expression:
    """Return the expression of a syntax tree: the whole one, or the argument of a reduction."""
    operands = _Operands(whole, quoted)
    code = ast.unparse(operands.visit(tree))
    if not operands.operands:
        raise whole.error("an expression without a field")
    return replace(whole, code=code, operands=operands.operands)


def _check_syntax(whole: Expression, tree: ast.Expression) -> None:
    """Raise ``FormatError`` unless the expression has nothing but fields, constants, operators and functions."""
    for node in ast.walk(tree):
        chained = isinstance(node, ast.Compare) and len(node.ops) > 1
        if not isinstance(node, _SYNTAX) or chained or (isinstance(node, ast.Call) and not _is_call(node)):
            is_whole = isinstance(node, ast.expr)
            syntax = f"the syntax {ast.unparse(node)!r}" if is_whole else f"the operator {type(node).__name__}"
            hint = "; a name with dots stands in backticks" if isinstance(node, ast.Attribute) else ""
            raise whole.error(f"{syntax}{hint}")
        if isinstance(node, ast.Constant) and not isinstance(node.value, bool | int | float | str):
            raise whole.error(f"the constant {node.value!r}")


def _is_call(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and not node.keywords


_SYNTAX = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Name, ast.Constant, ast.expr_context),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.BitAnd, ast.BitOr),
    *(ast.UAdd, ast.USub, ast.Invert, ast.List, ast.Tuple, ast.Subscript),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
)


class _Operands(ast.NodeTransformer):
    """Transformer that puts variables in place of the operands.

    Parameters
    ----------
    whole : the expression, for errors.
    quoted : field name for each variable that stands for a name in backticks.
    """

    def __init__(self, whole: Expression, quoted: Mapping[str, str]) -> None:
        self._whole, self._quoted = whole, quoted
        self.operands: dict[str, Operand] = {}
        self._variables: dict[str, str] = {}  # for equal operands

    def _variable(self, operand: Operand) -> ast.Name:
        variable = self._variables.setdefault(repr(operand), f"operand_{len(self._variables)}")
        self.operands.setdefault(variable, operand)
        return ast.Name(variable, ast.Load())

    def _field(self, node: ast.expr) -> str | None:
        return self._quoted.get(node.id, node.id) if isinstance(node, ast.Name) else None

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id == NAN:
            return node
        return self._variable(Numbers(self._quoted.get(node.id, node.id)))

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str):
            raise self._whole.error(f"the text {node.value!r} outside of a comparison of a field: field == 'text'")
        return node

    def visit_List(self, node: ast.List) -> ast.expr:
        raise self._whole.error(f"the list {ast.unparse(node)!r} outside of a comparison: field in [...]")

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        raise self._whole.error(f"the list {ast.unparse(node)!r} outside of a comparison: field in (...)")

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        operator, other = node.ops[0], node.comparators[0]
        if isinstance(operator, ast.In | ast.NotIn):
            return self._membership(node, other, isinstance(operator, ast.NotIn))
        left, right = (isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (node.left, other))
        if not left and not right:
            return self.generic_visit(node)  # type: ignore[return-value]
        field, text = self._field(other if left else node.left), node.left if left else other
        if field is None or not isinstance(text, ast.Constant) or not isinstance(operator, ast.Eq | ast.NotEq):
            raise self._whole.error(f"{ast.unparse(node)!r}", expected="texts are compared by field == 'text'")
        test = self._variable(TextTest(field, str(text.value)))
        return test if isinstance(operator, ast.Eq) else ast.UnaryOp(ast.Invert(), test)

    def _membership(self, node: ast.Compare, values: ast.expr, negative: bool) -> ast.expr:
        """Return ``field in [a, b]`` as comparisons."""
        if not isinstance(values, ast.List | ast.Tuple) or not values.elts:
            raise self._whole.error(f"{ast.unparse(node)!r}", expected="a list of constants: field in [1, 2]")
        tests = [self.visit_Compare(ast.Compare(node.left, [ast.Eq()], [value])) for value in values.elts]
        any_of = tests[0]
        for test in tests[1:]:
            any_of = ast.BinOp(any_of, ast.BitOr(), test)
        return ast.UnaryOp(ast.Invert(), any_of) if negative else any_of

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        argument, inner = _level(self._whole, self._quoted, node.value), node.slice
        negative = isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.USub)
        number = inner.operand if isinstance(inner, ast.UnaryOp) and negative else inner
        if not isinstance(number, ast.Constant):
            return self._variable(Elements((argument, _level(self._whole, self._quoted, inner))))
        if not isinstance(number.value, int) or isinstance(number.value, bool):
            raise self._whole.error(
                f"{ast.unparse(node)!r}", expected=f"a position, {self._whole.examples[0]}[0], or a condition"
            )
        return self._variable(Element((argument,), -number.value if negative else number.value))

    def visit_Call(self, node: ast.Call) -> ast.expr:
        assert isinstance(node.func, ast.Name)
        name = node.func.id
        if name in TIMES:
            field = self._field(node.args[0]) if len(node.args) == 1 else None
            if field is None:
                raise self._whole.error(f"{ast.unparse(node)!r}", expected=f"{name}() of a field of times")
            return self._variable(TimePart(field, name))
        if name not in REDUCTIONS:
            if name not in FUNCTIONS:
                near = near_matches(name, (*REDUCTIONS, *TIMES, *FUNCTIONS), 8)
                raise self._whole.error(f"the function {name!r}", expected=f"one of {near}")
            count = FUNCTIONS[name]
            if len(node.args) != count:
                arguments = f"{count} arguments" if count > 1 else "one argument"
                raise self._whole.error(f"{ast.unparse(node)!r}", expected=f"{arguments} in {name}()")
            node.args = [self.visit(argument) for argument in node.args]
            return node
        if len(node.args) != 1:
            raise self._whole.error(
                f"{ast.unparse(node)!r}",
                expected=f"{name}() of one argument with several numbers for each sample; of two: where(a > b, a, b)",
            )
        return self._variable(Reduction((_level(self._whole, self._quoted, node.args[0]),), name))


def in_order(expressions: Mapping[str, Expression], wanted: Iterable[str]) -> list[str]:
    """Return the wanted derived fields and those that they are made of, each behind all that it is made of.

    Parameters
    ----------
    expressions : by name of the derived field.
    wanted : names, of which those that are not derived are left out.

    Raises
    ------
    FormatError : derived fields are made of one another in a circle.

    Examples
    --------
    >>> expressions = {"c": parse("b + a"), "b": parse("a * 2"), "unused": parse("x")}
    >>> in_order(expressions, ["c", "a"])
    ['b', 'c']
    """
    ordered: dict[str, None] = {}
    pending = [(name, False) for name in reversed(list(wanted)) if name in expressions]
    open_names: dict[str, None] = {}
    while pending:
        name, is_complete = pending.pop()
        if is_complete:
            del open_names[name]
            ordered[name] = None
        elif name in open_names:
            circle = [*list(open_names)[list(open_names).index(name) :], name]
            raise FormatError(
                "derive= has fields that are made of one another",
                field=name,
                expected="fields that are made of fields of the files, in the end",
                found=" <- ".join(circle),
                remedy="give a derived field another name than those of the fields that it is made of",
            )
        elif name not in ordered:
            open_names[name] = None
            pending.append((name, True))
            pending += [(inner, False) for inner in expressions[name].fields if inner in expressions]
    return list(ordered)
