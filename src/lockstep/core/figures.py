"""The lines of a run's files of figures: `metrics.jsonl`, the reference for all figures, and `gpu.jsonl`."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.core.safe_read import is_number, parsed_json, read_lines

Figures = Sequence[tuple[int, Mapping[str, float]]]

STAMP = "time"  # of a line of `metrics.jsonl`, besides its step and scalars
# How the tags begin of what an evaluation writes, after the figures of its step.
EVALUATED = ("loss/val", "loss/train_epoch", "perf/time/")


def place_of(step: int, tags: Iterable[str]) -> float:
    """Where figures are in the order of a run: an evaluation is half a step behind its step."""
    return step + 0.5 if any(tag.startswith(EVALUATED) for tag in tags) else step


def finite(scalars: Mapping[str, float]) -> dict[str, float]:
    """The scalars that have a value, for what has no other way to say that there is none."""
    return {tag: value for tag, value in scalars.items() if math.isfinite(value)}


def parsed_figures(line: str) -> tuple[int, dict[Any, Any]]:
    """The step and the scalars of a line of `metrics.jsonl`.

    Raises:
        ValueError, RecursionError: it is not one of ours.
    """
    match parsed_json(line):
        case {"step": int(step), **scalars} if is_number(step):
            if all(value is None or is_number(value) for value in scalars.values()):
                return step, scalars
    raise ValueError("not a line of figures")


def read_figures(path: Path, after: float = math.inf, nulls: bool = False) -> Iterator[tuple[int, dict[str, float]]]:
    """The steps up to `RunInfo.after` in a `metrics.jsonl`, if there is one: finite scalars, and NaN for `nulls`."""
    for line in read_lines(path) if path.exists() else ():
        with suppress(ValueError, RecursionError):
            step, scalars = parsed_figures(line or "")
            if place_of(step, scalars) <= after:
                named = {tag: math.nan if value is None else value for tag, value in scalars.items() if tag != STAMP}
                yield step, named if nulls else finite(named)


def parsed_samples(line: str) -> tuple[int, dict[str, Any]]:
    """The step and the figures by tag of a line of `gpu.jsonl`.

    Raises:
        ValueError, RecursionError: it is not one of ours.
    """
    match parsed_json(line):
        case {"time": _, "step": int(step), "local_rank": rank, "uuid": _, **figures}:
            return step, {f"gpu/{name}/{rank}": value for name, value in figures.items() if is_number(value)}
    raise ValueError("not a line of GPU figures")


def read_samples(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """The steps in a `gpu.jsonl`, if there is one, with the figures of a GPU by tag."""
    for line in read_lines(path) if path.exists() else ():
        with suppress(ValueError, RecursionError):
            yield parsed_samples(line or "")
