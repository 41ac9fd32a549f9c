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
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, combinations
from keyword import kwlist
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np

from matex_data.errors import FormatError, near_matches

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


class Use(NamedTuple):
    """Use of a field in an expression.

    Parameters
    ----------
    name : of the field.
    is_number : its numbers are used: it is neither compared with a text nor a time.
    is_inner : it is in an argument that has several numbers for each sample.
    is_condition : it is in the condition ``[...]`` by which elements are chosen.
    """

    name: str
    is_number: bool = True
    is_inner: bool = False
    is_condition: bool = False


def uses(node: ast.AST) -> Iterator[Use]:
    """Yield the uses of fields in the tree of an expression, from left to right."""
    match node:
        case ast.Name(id=name):
            yield Use(name)
        case ast.Compare(left=ast.Name(id=name), comparators=[ast.Constant(value=str())]):
            yield Use(name, is_number=False)
        case ast.Compare(left=ast.Name(id=name), comparators=[ast.Tuple(elts=[ast.Constant(value=str()), *_])]):
            yield Use(name, is_number=False)
        case ast.Call(func=ast.Name(id=function), args=arguments):
            for use in chain.from_iterable(map(uses, arguments)):
                is_inner = use.is_inner or function in REDUCTIONS
                yield use._replace(is_number=use.is_number and function not in TIMES, is_inner=is_inner)
        case ast.Subscript(value=value, slice=inner):
            yield from (use._replace(is_inner=True) for use in uses(value))
            yield from (use._replace(is_inner=True, is_condition=True) for use in uses(inner))
        case _:
            yield from chain.from_iterable(map(uses, ast.iter_child_nodes(node)))


@dataclass(frozen=True)
class Expression:
    """Parsed expression.

    Parameters
    ----------
    option : for which the user wrote it, such as ``"where="``, for errors.
    text : as the user wrote it.
    tree : its syntax tree, which has been checked. Names are those of fields, whatever their characters; a comparison
        with a text is ``field == 'text'``, a position a constant. A list has constants alone, either
        numbers or texts: ``field in (1, 2)``.
    """

    option: str
    text: str
    tree: ast.expr

    @property
    def fields(self) -> list[str]:
        """Names of all fields, those in arguments too, without duplicates."""
        return list(dict.fromkeys(use.name for use in uses(self.tree)))

    @property
    def outside(self) -> list[str]:
        """Names of the fields that are in no arguments of several numbers for each sample."""
        return list(dict.fromkeys(use.name for use in uses(self.tree) if not use.is_inner))

    @property
    def numbers(self) -> list[str]:
        """Names of the fields whose numbers are used, without those that are times or compared with texts."""
        return list(dict.fromkeys(use.name for use in uses(self.tree) if use.is_number))

    def quoted(self, is_field: Callable[[str], bool]) -> Expression:
        """Return the expression with names that have slashes in backticks; see `quote_paths`.

        Raises
        ------
        FormatError : a name has two meanings.
        """
        constants_of_tree = (node.value for node in ast.walk(self.tree) if isinstance(node, ast.Constant))
        if any(value is np.nan for value in constants_of_tree) and is_field(NAN):
            remedy = f"write `{NAN}` for the field; where(x == x, x, y) takes y where x is missing"
            raise self.error(f"{NAN}, the missing number, which is a field, too", remedy=remedy)
        text = quote_paths(self.text, self.option, is_field)
        return self if text == self.text else parse(text, self.option)

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
        words = re.findall(r"`[^`]+`|\b[^\W\d]\w*\b(?!\s*\()", re.sub(_TEXT, "", str(self.text)))
        names = list(dict.fromkeys(word for word in words if word not in NO_FIELDS)) or ["x", "y"]
        return names[0], names[-1] if len(names) < 2 else names[1]


def constants(values: ast.expr) -> list[Any]:
    """Return the numbers or texts of a list.

    >>> constants(parse("x not in [1, 2.5]").tree.operand.comparators[0])
    [1, 2.5]
    """
    elements = values.elts if isinstance(values, ast.Tuple) else []
    return [one.value for one in elements if isinstance(one, ast.Constant)]


def compared_as(comparison: ast.Compare, dtypes: Mapping[str, np.dtype[Any]]) -> Callable[[Any], Any] | None:
    """Return the floats of fewer than 64 bits in which NumPy compares the numbers of fields; None: there are none.

    Parameters
    ----------
    comparison : of an expression.
    dtypes : of its fields, by name.
    """
    whole = np.dtype(np.int64)  # of parts of times
    used = {dtypes[use.name] if use.is_number else whole for use in uses(comparison) if not use.is_condition}
    common = np.result_type(*used) if used and all(dtype.kind in "biuf" for dtype in used) else np.dtype(bool)
    return common.type if common.kind == "f" and common.itemsize < 8 else None


def stand_for_others(categories: Sequence[str]) -> bool:
    """Return whether a category is a number, or truth value, other than its code.

    >>> stand_for_others(["10", "20"]), stand_for_others(["0", "1", "many"]), stand_for_others(["False", "True"])
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
    >>> ast.unparse(parse("~(species not in ['a', 'b'])").tree)
    "~~(species in ('a', 'b'))"
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

    whole = Expression(option, text, ast.Constant(None))
    if not isinstance(text, str):
        raise whole.error(f"{type(text).__name__}")
    try:
        tree = ast.parse(_NAMES.sub(variable, text).strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        keywords = [word for word in re.findall(r"\w+", text) if word in KEYWORDS]
        hint = f"; a field of the name {keywords[0]!r} stands in backticks: `{keywords[0]}`" if keywords else ""
        raise whole.error(f"{error}{hint}") from error
    try:
        return replace(whole, tree=_Checked(whole, quoted).argument(tree.body))
    except RecursionError as error:
        remedy = "compare with a list of values: x in [1, 2, 3]; or derive= fields of parts of the expression"
        raise whole.error("operators within operators, hundreds deep", remedy=remedy) from error


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
    for begin, stop in combinations(range(len(parts) + 1), 2):
        if stop - begin > 1:
            yield "/".join(parts[begin:stop])


def _meanings(parts: Sequence[str], is_field: Callable[[str], bool]) -> list[tuple[str, ...]]:
    """Return the ways to divide the parts of a path into names of fields, and numbers."""
    if not parts:
        return [()]
    names = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    known = [name for name in names if name.isdecimal() or is_field(name)]
    return [(name, *rest) for name in known for rest in _meanings(parts[name.count("/") + 1 :], is_field)]


_SYNTAX = (
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.BitAnd, ast.BitOr),
    *(ast.UnaryOp, ast.UAdd, ast.USub, ast.Invert, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)


class _Checked(ast.NodeTransformer):
    """Transformer that checks a syntax tree, and gives it the form that `Expression` describes.

    Parameters
    ----------
    whole : the expression, for errors.
    quoted : field name for each variable that stands for a name in backticks.
    """

    def __init__(self, whole: Expression, quoted: Mapping[str, str]) -> None:
        self._whole, self._quoted = whole, quoted

    def argument(self, tree: ast.expr) -> ast.expr:
        """Return the whole expression, or the argument of a reduction; raise ``FormatError`` if it has no field."""
        checked: ast.expr = self.visit(tree)
        if not any(uses(checked)):
            hint = f"; a field of the name {NAN!r} stands in backticks: `{NAN}`" if NAN in self._whole.text else ""
            raise self._whole.error(f"an expression without a field{hint}")
        return checked

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Check that a node is none but a field, constant, operator or function; its children, too."""
        if not isinstance(node, _SYNTAX):
            is_whole = isinstance(node, ast.expr)
            syntax = f"the syntax {ast.unparse(node)!r}" if is_whole else f"the operator {type(node).__name__}"
            hint = "; a name with dots stands in backticks" if isinstance(node, ast.Attribute) else ""
            raise self._whole.error(f"{syntax}{hint}")
        return super().generic_visit(node)

    def _field(self, node: ast.expr | None) -> ast.Name | None:
        return ast.Name(self._quoted.get(node.id, node.id)) if isinstance(node, ast.Name) else None

    def visit_Name(self, node: ast.Name) -> ast.expr | None:
        return ast.Constant(np.nan) if node.id == NAN else self._field(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str):
            raise self._whole.error(f"the text {node.value!r} outside of a comparison of a field: field == 'text'")
        if not isinstance(node.value, bool | int | float):
            raise self._whole.error(f"the constant {node.value!r}")
        return node

    def visit_List(self, node: ast.List) -> ast.expr:
        raise self._whole.error(f"the list {ast.unparse(node)!r} outside of a comparison: field in [...]")

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        raise self._whole.error(f"the list {ast.unparse(node)!r} outside of a comparison: field in (...)")

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        operator, other = node.ops[0], node.comparators[0]
        if len(node.ops) > 1:
            raise self._whole.error(f"the syntax {ast.unparse(node)!r}")
        if isinstance(operator, ast.In | ast.NotIn):
            return self._membership(node, other, isinstance(operator, ast.NotIn))
        left, right = (isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (node.left, other))
        if not left and not right:
            return self.generic_visit(node)
        side, text = (other, node.left) if left else (node.left, other)
        test = ast.Compare(self._of_texts(side, node), [ast.Eq()], [text])
        return test if isinstance(operator, ast.Eq) else ast.UnaryOp(ast.Invert(), test)

    def _membership(self, node: ast.Compare, values: ast.expr, negative: bool) -> ast.expr:
        """Return ``field in [a, b]`` as one test of all texts, one of all numbers, and a comparison with each other."""
        if not isinstance(values, ast.List | ast.Tuple) or not values.elts:
            raise self._whole.error(f"{ast.unparse(node)!r}", expected="a list of constants: field in [1, 2]")
        found = list(map(_constant, values.elts))
        texts: list[ast.expr] = [ast.Constant(value) for value in found if isinstance(value, str)]
        numbers: list[ast.expr] = [ast.Constant(value) for value in found if isinstance(value, int | float)]
        others = [value for value, constant in zip(values.elts, found, strict=True) if constant is None]
        tests: list[Any] = []
        if texts:
            tests.append(ast.Compare(self._of_texts(node.left, node), [ast.In()], [ast.Tuple(texts)]))
        if numbers:
            left = self.visit(deepcopy(node.left))  # a visit changes its node
            tests.append(ast.Compare(left, [ast.In()], [ast.Tuple(numbers)]))
        tests += [self.visit_Compare(ast.Compare(deepcopy(node.left), [ast.Eq()], [value])) for value in others]
        while len(tests) > 1:  # a tree of thousands of values is not deep
            joined = (ast.BinOp(one, ast.BitOr(), other) for one, other in zip(tests[::2], tests[1::2], strict=False))
            tests = [*joined, *tests[len(tests) // 2 * 2 :]]
        return ast.UnaryOp(ast.Invert(), tests[0]) if negative else tests[0]

    def _of_texts(self, side: ast.expr, node: ast.Compare) -> ast.Name:
        """Return the field on the side of a comparison whose other side is of texts."""
        field = self._field(side)
        if field is None or not isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn):
            raise self._whole.error(f"{ast.unparse(node)!r}", expected="texts are compared by field == 'text'")
        return field

    def visit_Subscript(self, node: ast.Subscript) -> ast.Subscript:
        value, inner = self.argument(node.value), node.slice
        negative = isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.USub)
        number = inner.operand if isinstance(inner, ast.UnaryOp) and negative else inner
        if not isinstance(number, ast.Constant):
            return ast.Subscript(value, self.argument(inner))
        if not isinstance(number.value, int) or isinstance(number.value, bool):
            expected = f"a position, {self._whole.examples[0]}[0], or a condition"
            raise self._whole.error(f"{ast.unparse(node)!r}", expected=expected)
        return ast.Subscript(value, ast.Constant(-number.value if negative else number.value))

    def visit_Call(self, node: ast.Call) -> ast.Call:
        if not isinstance(node.func, ast.Name) or node.keywords:
            raise self._whole.error(f"the syntax {ast.unparse(node)!r}")
        name, expected = node.func.id, None
        if name not in (*REDUCTIONS, *TIMES, *FUNCTIONS):
            near = near_matches(name, (*REDUCTIONS, *TIMES, *FUNCTIONS), 8)
            raise self._whole.error(f"the function {name!r}", expected=f"one of {near}")
        count = FUNCTIONS.get(name, 1)
        if name in TIMES and (len(node.args) != 1 or self._field(node.args[0]) is None):
            expected = f"{name}() of a field of times"
        elif name in REDUCTIONS and len(node.args) != 1:
            expected = f"{name}() of one argument with several numbers for each sample; of two: where(a > b, a, b)"
        elif len(node.args) != count:
            expected = f"{f'{count} arguments' if count > 1 else 'one argument'} in {name}()"
        if expected is not None:
            raise self._whole.error(f"{ast.unparse(node)!r}", expected=expected)
        return ast.Call(
            node.func, [(self.argument if name in REDUCTIONS else self.visit)(one) for one in node.args], []
        )


def _constant(node: ast.expr) -> str | float | None:
    """Return the text or number that a value of a list is; None: it is of another kind."""
    match node:
        case ast.Constant(value=str() | int() | float() as value):
            return value
        case ast.Name(id=name) if name == NAN:
            return np.nan
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    return None


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
