"""Changes of the code: those of cosmic-ray that apply here, and those of faults that this code could have."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import parso
from cosmic_ray.operators import (
    binary_operator_replacement,
    boolean_replacer,
    break_continue,
    comparison_operator_replacement,
    number_replacer,
    zero_iteration_for_loop,
)
from cosmic_ray.operators.operator import Example, Operator

WORDS_OF_ERRORS = ("problem", "expected", "found", "remedy", "help")
"""Keyword arguments that are texts for people."""

Position = tuple[tuple[int, int], tuple[int, int]]


class Rewriting(Operator):
    """An operator that replaces a node of the syntax tree by other code."""

    @abstractmethod
    def rewritten(self, node: Any) -> Iterable[str]:
        """Return the code of each change of a node, without the white space before it."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        """Yield the position of a node once for each of its changes."""
        for _ in self.rewritten(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Return the tree of a change."""
        return parso.parse(node.get_first_leaf().prefix + list(self.rewritten(node))[index])

    @classmethod
    def examples(cls) -> Iterable[Example]:
        """Return code before and after the change; ``tests/mutants/test_operators.py`` compares them."""
        return [Example(before, after) for before, after in cls.changes.items()]

    changes: ClassVar[Mapping[str, str]] = {}


class RangeOffByOne(Rewriting):
    """The end of a range of rows is one lower."""

    changes: ClassVar[Mapping[str, str]] = {"x[a:b]": "x[a:(b) - 1]", "range(a, n + 1)": "range(a, (n + 1) - 1)"}

    def rewritten(self, node: Any) -> Iterable[str]:
        if node.type == "subscript" and len(node.children) == 3 and node.children[1] == ":":
            first, _, last = node.children
            yield f"{code(first)}:({code(last)}) - 1"
        if called(node) == "range" and len(arguments(node)) == 2:
            first, last = arguments(node)
            yield f"range({code(first)}, ({code(last)}) - 1)"


class KeywordLeftOut(Rewriting):
    """A call has one keyword argument less: weights, units, limits and options fall back to their defaults."""

    changes: ClassVar[Mapping[str, str]] = {"f(a, weights=w)": "f(a)", "f(units=u, b=2)": "f( b=2)"}

    def rewritten(self, node: Any) -> Iterable[str]:
        if node.type not in ("atom_expr", "power") or not called(node):
            return
        *function, _ = node.children
        given = arguments(node)
        for number, argument in enumerate(given):
            named = argument.type == "argument" and argument.children[1] == "="
            if named and argument.children[0].value not in WORDS_OF_ERRORS:
                rest = [other.get_code() for other in given[:number] + given[number + 1 :]]
                yield f"{''.join(map(code, function))}({','.join(rest)})"


class FactorLeftOut(Rewriting):
    """A product lacks its last factor: a weight, a scale or a mask."""

    changes: ClassVar[Mapping[str, str]] = {"a * weight": "a"}

    def rewritten(self, node: Any) -> Iterable[str]:
        factors = node.children[::2] if node.type == "term" else []
        if factors and node.children[-2] == "*" and not any(child.type in ("string", "fstring") for child in factors):
            yield "".join(child.get_code() for child in node.children[:-2]).strip()


class LockNotTaken(Rewriting):
    """A block runs without its lock."""

    changes: ClassVar[Mapping[str, str]] = {"with self._lock: f()": "with __import__('contextlib').nullcontext(): f()"}

    def rewritten(self, node: Any) -> Iterable[str]:
        parent = node.parent
        is_lock = parent is not None and parent.type == "with_stmt" and node is parent.children[1]
        if is_lock and re.search(r"(?<![a-z])(lock|condition)s?\b(?!=)", code(node), re.IGNORECASE):
            yield "__import__('contextlib').nullcontext()"


class WaitWithoutEnd(Rewriting):
    """A wait has no limit of time."""

    changes: ClassVar[Mapping[str, str]] = {"event.wait(5)": "event.wait()", "q.get(timeout=t)": "q.get()"}

    def rewritten(self, node: Any) -> Iterable[str]:
        if called(node) in ("wait", "join", "result", "get", "acquire") and arguments(node):
            *function, _ = node.children
            limited = called(node) not in ("get", "join") or "timeout" in code(node)
            if limited and len(arguments(node)) == 1:
                yield f"{''.join(map(code, function))}()"


class BoundLeftOut(Rewriting):
    """The size of a buffer or a number of threads has no bound: ``min`` and ``max`` give their first argument."""

    changes: ClassVar[Mapping[str, str]] = {"min(a, b + 1)": "(a)"}

    def rewritten(self, node: Any) -> Iterable[str]:
        if called(node) in ("min", "max") and node.children[0].type == "name" and len(arguments(node)) == 2:
            first, second = arguments(node)
            if "argument" not in (first.type, second.type):
                yield f"({code(first)})"


class AgreementSkipped(Rewriting):
    """A rank does not take part in an agreement: it goes on with its own value."""

    changes: ClassVar[Mapping[str, str]] = {"comm.agree(error)": "None", "x = comm.bcast(value)": "x = (value)"}

    def rewritten(self, node: Any) -> Iterable[str]:
        name = called(node)
        if node.type not in ("atom_expr", "power") or node.children[0].type != "name":
            return
        if name in ("agree", "check_equal", "Barrier", "barrier", "check_same"):
            yield "None"
        elif name in ("bcast", "allreduce") and arguments(node):
            yield f"({code(arguments(node)[0])})"


class CheckLeftOut(Rewriting):
    """An error is not raised: the condition before it is never true."""

    changes: ClassVar[Mapping[str, str]] = {"if a > b:\n    raise E\n": "if False:\n    raise E\n"}

    def rewritten(self, node: Any) -> Iterable[str]:
        parent = node.parent
        if parent is not None and parent.type == "if_stmt" and node is parent.children[1]:
            suite = parent.children[3]
            statements = [child for child in getattr(suite, "children", []) if child.type == "simple_stmt"]
            if statements and statements[0].children[0].type == "raise_stmt":
                yield "False"


class StatementLeftOut(Rewriting):
    """A call for its effect is left out."""

    changes: ClassVar[Mapping[str, str]] = {"self.forget(x)\n": "pass\n"}

    def rewritten(self, node: Any) -> Iterable[str]:
        parent = node.parent
        if parent is not None and parent.type == "simple_stmt" and node is parent.children[0] and called(node):
            yield "pass"


def code(node: Any) -> str:
    """Return the code of a node without the white space before it."""
    return str(node.get_code(include_prefix=False))


def called(node: Any) -> str:
    """Return the last name of the function that an expression calls, "" if it calls none."""
    if node.type not in ("atom_expr", "power") or node.children[-1].type != "trailer":
        return ""
    *_, function, call = node.children
    if call.children[0] != "(":
        return ""
    last = function.children[-1] if function.type == "trailer" else function
    return str(last.value) if last.type == "name" else ""


def arguments(node: Any) -> list[Any]:
    """Return the arguments of a call."""
    inside = node.children[-1].children[1:-1]
    if inside and inside[0].type == "arglist":
        return [child for child in inside[0].children if child != ","]
    return list(inside)


def _named(module: Any, *names: str) -> list[type[Operator]]:
    return [vars(module)[name] for name in names]


OPERATORS: Mapping[str, type[Operator]] = {
    operator.__name__: operator
    for operator in (
        *_named(
            comparison_operator_replacement,
            *("ReplaceComparisonOperator_Lt_LtE", "ReplaceComparisonOperator_LtE_Lt"),
            *("ReplaceComparisonOperator_Gt_GtE", "ReplaceComparisonOperator_GtE_Gt"),
            *("ReplaceComparisonOperator_Eq_NotEq", "ReplaceComparisonOperator_NotEq_Eq"),
            *("ReplaceComparisonOperator_Is_IsNot", "ReplaceComparisonOperator_IsNot_Is"),
        ),
        *_named(
            binary_operator_replacement,
            *("ReplaceBinaryOperator_Add_Sub", "ReplaceBinaryOperator_Sub_Add"),
            *("ReplaceBinaryOperator_FloorDiv_Mul", "ReplaceBinaryOperator_Div_Mul"),
        ),
        *_named(boolean_replacer, "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
        *_named(boolean_replacer, "ReplaceAndWithOr", "ReplaceOrWithAnd"),
        *_named(break_continue, "ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
        number_replacer.NumberReplacer,
        zero_iteration_for_loop.ZeroIterationForLoop,
        *Rewriting.__subclasses__(),
    )
}
"""Classes of operators by name."""
