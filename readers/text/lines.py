"""Lines of a text and their entries, found and checked for all lines in one go.

HepMC reads a word as 0, cuts a number at a tab, takes an entry more for the next one, and wraps large integers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Bytes, Integers
from matex_data.errors import DecodeError
from matex_data.locks import cached_property

SPACE, NEWLINE, MINUS, PLUS, POINT, EXPONENT, ZERO = b" \n-+.e0"
INT32 = np.iinfo(np.int32)
MOST_DIGITS = 18  # of an integer that int64 holds whatever its digits are
REAL = rb"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)"
LEAST_FORM = 6  # bytes of a number like 1.2e+03, and less than its bytes
SHOWN_BYTES = 160  # of a line in a message
_REAL = re.compile(REAL)

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Lines:
    """Lines of a text, whose entries single spaces separate. White space at the end of a line is no entry.

    Parameters
    ----------
    text : with a line end at its end.
    begin : int64[lines], byte where each line begins.
    blank : int64[entries], byte behind each entry of each line.
    first : int64[lines], position in ``blank`` of the first entry of each line.
    count : int64[lines], number of entries.
    """

    text: bytes
    begin: Integers
    blank: Integers
    first: Integers
    count: Integers

    @classmethod
    def of(cls, text: bytes) -> Lines:
        """Return the lines of a text."""
        text = text if text.endswith(b"\n") else text + b"\n"
        data = np.frombuffer(text, np.uint8)
        blank = np.flatnonzero(data <= SPACE)
        is_end = data[blank] == NEWLINE
        begin = np.concatenate([[0], blank[is_end][:-1] + 1])
        while len(trailing := np.flatnonzero((np.diff(blank) == 1) & is_end[1:] & ~is_end[:-1])):
            is_end[trailing] = True
            blank, is_end = np.delete(blank, trailing + 1), np.delete(is_end, trailing + 1)
        ends = np.flatnonzero(is_end)
        first = np.concatenate([[0], ends[:-1] + 1])
        return cls(text, begin, blank, first, ends - first + 1)

    @cached_property
    def data(self) -> Bytes:
        """Return the bytes of the text, uint8."""
        return np.frombuffer(self.text, np.uint8)

    @cached_property
    def letter(self) -> Bytes:
        """Return the first byte of each line, uint8[lines]; that of a line end if it is empty."""
        return self.data[self.begin]

    @cached_property
    def _others(self) -> Integers:
        """Return the number of bytes of each entry that are no digits, int32[entries]."""
        begin = np.concatenate([[0], self.blank + 1])
        no_digit = (self.data[: begin[-1]] - ZERO > 9).view(np.uint8)
        return np.add.reduceat(no_digit, begin[:-1], dtype=np.int32) - 1  # without the blank behind the entry

    def line(self, number: int) -> bytes:
        """Return a line, without white space at its end."""
        return self.text[self.begin[number] : self.text.index(b"\n", self.begin[number])].rstrip()

    def entries(self, lines: Integers, position: int) -> tuple[Integers, Integers]:
        """Return where the entries at a position of these lines begin and end, in bytes."""
        at = self.first[lines] + position
        return self.blank[at - 1] + 1, self.blank[at]

    def integers(self, lines: Integers, position: int, largest: int = INT32.max) -> Integers:
        """Return the integers at a position of these lines.

        Raises
        ------
        DecodeError : an entry is no integer, or beyond ``largest``.
        """
        begin, end = self.entries(lines, position)
        sign = (self.data[begin] == MINUS) | (self.data[begin] == PLUS)
        begin, digits = begin + sign, end - begin - sign
        wrong = (digits < 1) | (digits > MOST_DIGITS) | (self.others(lines, position) != sign)
        self.check(lines, wrong, f"an integer as entry {position}")
        values = self.values(begin, digits)
        values[sign & (self.data[begin - 1] == MINUS)] *= -1
        self.check(lines, np.abs(values) > largest, f"an integer of up to {largest} as entry {position}")
        return values

    def values(self, begin: Integers, digits: Integers) -> Integers:
        """Return the integers that consist of these numbers of digits, int64[n]."""
        values = np.zeros(len(begin), np.int64)
        longer = np.arange(len(begin))
        for digit in range(int(digits.max(initial=0))):
            longer = longer[digits[longer] > digit]
            values[longer] = values[longer] * 10 + self.data[begin[longer] + digit] - ZERO
        return values

    def others(self, lines: Integers, position: int) -> Integers:
        """Return the number of bytes that are no digits, of the entries at a position of these lines."""
        return self._others[self.first[lines] + position]

    def check_reals(self, lines: Integers, positions: Sequence[int]) -> None:
        """Raise ``DecodeError`` unless the entries at these positions of these lines are numbers.

        Those like ``-1.234e+05`` and ``0`` are recognized in one go, others one by one.
        """
        for position in positions:
            begin, end = self.entries(lines, position)
            sign = self.data[begin] == MINUS
            others = self.others(lines, position) - sign
            length = end - begin - sign
            known = (length > LEAST_FORM) & (others == 3)
            at = np.where(known, end, LEAST_FORM)
            known &= self.data[np.where(known, begin + sign + 1, 0)] == POINT
            known &= (self.data[at - 4] == EXPONENT) & ((self.data[at - 3] == MINUS) | (self.data[at - 3] == PLUS))
            known |= (others == 0) & (length > 0)
            wrong = ~known
            for i in np.flatnonzero(wrong).tolist():
                wrong[i] = _REAL.fullmatch(self.text, int(begin[i]), int(end[i])) is None
            self.check(lines, wrong, f"a number as entry {position}")

    def check_blanks(self, lines: Integers) -> None:
        """Raise ``DecodeError`` if other white space than a space separates entries of these lines."""
        other = self.data[self.blank] != SPACE
        other[self.first + self.count - 1] = False
        wrong = np.zeros(len(self.begin), bool)
        wrong[np.searchsorted(self.first, np.flatnonzero(other), side="right") - 1] = True
        self.check(lines, wrong[lines], "single spaces between the entries")

    def check(self, lines: Integers, wrong: Flags, expected: str, problem: str = "a line is damaged") -> None:
        """Raise ``DecodeError`` for the first of these lines that is wrong."""
        if wrong.any():
            raise self.error(int(lines[np.argmax(wrong)]), expected, problem)

    def error(self, line: int, expected: object, problem: str = "a line is damaged") -> DecodeError:
        """Return the error for a line."""
        found = self.line(line)[:SHOWN_BYTES].decode("latin-1")
        return DecodeError(problem, byte=int(self.begin[line]), expected=expected, found=repr(found))
