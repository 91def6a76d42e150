"""Files that people give by mistake, told by their first bytes."""

import re
from typing import Literal

from common.tables import read_table

_FORMATS = [
    (re.compile(each["starts"].encode("latin-1")), each)
    for each in read_table(__file__, "foreign.yaml")["formats"]
]


def foreign(start: bytes, wanted: Literal["text", "table"]) -> str:
    """What a file that starts so is, and what to do with it; "" if it may be what is wanted."""
    found = (
        each for starts, each in _FORMATS if wanted in each and starts.match(start)
    )
    return next((f"{each['is']}: {each[wanted]}" for each in found), "")
