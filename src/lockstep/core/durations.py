"""How durations and times are written in a config: `100`, `2ep`, `5%`, `10min`."""

from __future__ import annotations

import re
from typing import Any

# The largest number of steps of a run: its product with the number of examples of any data set fits into 63 bits.
LONGEST = 10**9
# The longest time, in seconds. The timeout of a socket is in milliseconds and has 31 bits, which end at 596 hours.
LONGEST_S = 500 * 3600.0

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ep|%)?")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h)?")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


def parse_duration(value: Any) -> tuple[float, str] | None:
    """The amount and the unit (`ep`, `%`, or empty for steps) of a duration; None if it is not one."""
    match = _DURATION.fullmatch(str(value).strip()) if isinstance(value, int | str) else None
    if match is None or (match[2] is None and "." in match[1]):
        return None
    amount, unit = float(match[1]), match[2] or ""
    return (amount, unit) if amount <= (100 if unit == "%" else LONGEST) else None


def parse_time(value: Any) -> float | None:
    """The seconds of a time such as `30s`, `10min`, `2h` or a bare number (seconds); None if it is not one."""
    match = _TIME.fullmatch(str(value).strip())
    seconds = float(match[1]) * _SECONDS[match[2] or "s"] if match is not None else 0.0
    return seconds if 0 < seconds <= LONGEST_S else None


def is_timed(value: Any) -> bool:
    """Whether a value ends with the unit of a time."""
    return re.search(r"\d\s*(s|min|h)\s*$", str(value)) is not None
