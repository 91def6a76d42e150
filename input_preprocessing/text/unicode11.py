"""Unicode 11.0 as Python 3.7 has it, with which the reference's data was made, on any newer Python.

Characters that were assigned since then count as letters without case, as unassigned ones did; three others changed
their category. So a text gives the same tokens whatever Python runs, as far as it is 3.7 or newer.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from itertools import accumulate

# Where unassigned code points begin and end, each as the distance from the one before.
_DISTANCES = """
888 2 6 4 7 1 1 1 20 1 397 1 38 2 50 2 3 1 55 8 27 4 6 11 29 1 240 1 60 2 101 14 59 2 49 2 15 1 28 2 1 1 11 53 21 1 8
21 177 1 8 2 2 2 22 1 7 1 1 3 4 2 9 2 2 2 4 8 1 4 2 1 5 2 25 2 3 1 6 4 2 2 22 1 7 1 2 1 2 1 2 2 1 1 5 4 2 2 3 3 1 7 4
1 1 7 17 10 3 1 9 1 3 1 22 1 7 1 2 1 5 2 10 1 3 1 3 2 1 15 4 2 12 7 7 1 3 1 8 2 2 2 22 1 7 1 2 1 5 2 9 2 2 2 3 8 2 4 2
1 5 2 18 10 2 1 6 3 3 1 4 3 2 1 1 1 2 3 2 3 3 3 12 4 5 3 3 1 4 2 1 6 1 14 21 5 13 1 3 1 23 1 16 3 8 1 3 1 4 7 2 1 3 5
4 2 10 8 21 1 3 1 23 1 10 1 5 2 9 1 3 1 4 7 2 7 1 1 4 2 10 1 2 13 4 1 8 1 3 1 51 1 3 1 6 4 16 2 26 2 2 1 18 3 24 1 9 1
1 2 7 3 1 4 6 1 1 1 8 6 10 2 3 12 58 4 29 37 2 1 1 2 2 1 1 2 1 6 4 1 7 1 3 1 1 1 1 2 2 1 13 1 3 2 5 1 1 1 6 2 10 2 4
32 72 1 36 4 39 1 36 1 15 1 13 37 198 1 1 5 1 2 377 1 4 2 7 1 1 1 4 2 41 1 4 2 33 1 4 2 7 1 1 1 4 2 15 1 57 1 4 2 67 2
32 3 26 6 86 2 6 2 669 3 89 7 13 1 7 11 23 9 20 12 13 1 3 1 2 12 94 2 10 6 10 6 15 1 10 6 89 7 43 5 70 10 31 1 12 4 12
4 1 3 42 2 5 11 44 4 26 6 11 3 62 2 65 1 29 2 11 6 10 6 14 2 15 65 76 4 45 3 116 8 60 3 15 3 60 7 43 2 11 8 42 6 250 1
283 2 6 2 38 2 6 2 8 1 1 1 1 1 1 1 31 2 53 1 15 1 14 2 6 1 19 2 3 1 9 1 101 1 12 2 27 1 13 3 32 16 33 15 140 4 663 25
11 21 1812 2 32 2 49 1 53 1 47 1 47 1 148 5 45 1 1 5 1 2 56 7 2 14 24 9 7 1 7 1 7 1 7 1 7 1 7 1 7 1 7 1 111 49 26 1 89
12 214 26 12 4 64 1 86 2 103 5 43 1 94 1 43 5 36 12 47 1 223 1 6838 10 21040 16 1165 3 55 9 348 20 184 8 186 61 53 4
10 6 56 8 70 8 12 6 116 11 30 3 78 1 11 4 33 1 55 9 14 2 10 2 103 24 28 10 6 2 6 2 6 9 7 1 7 1 54 10 126 2 10 6 11172
12 23 4 49 4 8814 2 106 38 7 12 5 5 26 1 5 1 1 1 2 1 2 1 124 17 365 16 64 2 54 40 14 2 26 6 51 1 19 1 4 4 5 1 135 2 1
1 190 3 6 2 6 2 6 2 3 3 7 1 7 10 5 2 12 1 26 1 19 1 2 1 15 2 14 34 123 5 3 4 45 3 88 1 12 4 1 47 46 130 29 3 49 15 28
4 36 9 30 5 43 5 30 1 37 4 14 42 158 2 10 6 36 4 36 4 40 8 52 11 1 144 311 9 22 10 8 152 6 2 1 1 44 1 2 3 1 2 23 1 72
8 9 48 19 1 2 5 33 3 27 5 1 64 56 4 20 2 50 1 2 5 8 1 3 1 29 2 3 4 10 7 9 7 64 32 39 4 12 9 54 3 29 2 27 5 26 7 4 12 7
80 73 55 51 13 51 7 46 8 10 294 31 129 40 8 42 166 78 4 30 15 67 11 1 2 25 7 10 6 53 1 17 9 39 9 78 2 16 1 20 11 18 1
44 65 7 1 1 1 4 1 15 1 11 6 59 5 10 6 4 1 8 2 2 2 22 1 7 1 2 1 5 1 10 2 2 2 3 2 1 6 1 5 7 2 7 3 5 139 90 1 1 1 2 33 72
8 10 166 54 2 38 34 69 11 10 6 13 19 56 8 10 54 27 2 15 4 16 192 60 100 83 12 1 256 72 8 52 2 29 29 57 263 9 1 45 1 14
10 29 3 32 2 22 1 14 73 7 1 2 1 44 3 1 1 2 1 9 8 10 6 6 1 2 1 37 1 2 1 6 7 10 310 25 263 922 102 111 1 5 11 196 2748
1071 4049 583 8633 569 7 31 1 10 4 2 96 30 2 6 10 70 10 10 1 7 1 21 5 19 688 91 101 69 11 47 16 17 64 2 30 6130 14 755
9485 287 81 396 2308 107 5 13 3 9 7 10 2 8 4956 246 10 39 2 192 23 70 154 20 12 87 9 25 135 85 1 71 1 2 2 1 2 2 2 4 1
12 1 1 1 7 1 65 1 4 2 8 1 7 1 28 1 4 1 5 1 1 3 7 1 340 2 292 2 702 15 5 1 15 1360 7 1 17 2 7 1 2 1 5 2005 197 2 16 41
75 5 10 4 2 785 68 331 4 1 27 1 2 1 1 2 1 1 10 1 4 1 1 1 1 6 1 4 1 1 1 1 1 1 3 1 2 1 1 2 1 1 1 1 1 1 1 1 1 1 2 1 1 2 4
1 7 1 4 1 4 1 1 1 10 1 17 5 3 1 5 1 17 52 2 270 44 4 100 12 15 2 15 1 15 1 37 10 13 3 92 4 61 57 29 13 44 4 9 7 2 14 6
154 981 11 13 3 10 6 116 12 89 39 12 4 56 8 10 6 40 8 30 82 12 4 47 1 49 2 4 3 1 1 39 13 10 6 3 13 48 96 14 1426 42711
41 4149 11 222 2 5762 14 7473 3103 542 722403 1 30 96 128 240 65040 65534 2 65534 2
"""
_BOUNDS = list(accumulate(map(int, _DISTANCES.split())))

_CATEGORIES = {0x166D: "Po", 0x1734: "Mn", 0xA9BD: "Mc"}  # since changed to So, Mc and Mn
_NOT_IGNORED = (0x055F, 0xA9BD)  # between letters by which a final sigma is told; since changed

# Alike in all that matters here: a combining mark of class 9 that is still one, for one that no longer is.
REPLACED = {0x1734: "\u1714"}


def was_assigned(code: int) -> bool:
    """Whether Unicode 11.0 knew the code point."""
    return bisect_right(_BOUNDS, code) % 2 == 0


def category(code: int) -> str:
    """General category in Unicode 11.0; Cn of what it did not know."""
    return _CATEGORIES.get(code) or (unicodedata.category(chr(code)) if was_assigned(code) else "Cn")


def needs_shield(code: int) -> bool:
    """Whether lower() or normalize() now treat the code point, or its neighbours, in another way."""
    char = chr(code)
    if was_assigned(code):
        return code in _NOT_IGNORED
    return (
        unicodedata.category(char) in ("Lu", "Ll", "Lt", "Lm", "Mn", "Me", "Cf", "Sk")
        or char.lower() != char
        or unicodedata.combining(char) != 0
        or unicodedata.decomposition(char) != ""
    )
