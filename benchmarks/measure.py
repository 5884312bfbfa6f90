"""Shared by the benchmarks: turns, medians, tables and their JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(highlight=False, width=118)
Figures = dict[str, float]
Rows = dict[str, Figures]
SPREAD = ": highest by lowest"  # the end of the title of a table that says how far repeats differ


def parser(doc: str | None, *, repeats: int | None = None, of: str = "turns") -> argparse.ArgumentParser:
    """The common options: `--json`, and `--repeats` if there is a default for it."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if repeats is not None:
        options.add_argument("--repeats", type=int, default=repeats, help=f"{of} [{repeats}]")
    options.add_argument("--json", type=Path, help="where the figures go")
    return options


def living(text: str) -> list[int]:
    """The numbers of the living processes with `text` in their environment (Linux; elsewhere none are found).

    The environment is a list of `NAME=value`, with a NUL after each.
    """
    numbers = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
            ended = (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:  # the process has just ended, or belongs to another user
            continue
        if text.encode() in environment and not ended:
            numbers.append(int(entry.name))
    return numbers


def timed(call: Callable[[], object]) -> float:
    """The seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def in_turns(cases: Mapping[str, Callable[[], float]], repeats: int) -> Figures:
    """The median of each case, called in turns, so that other load on the machine slows all of them alike."""
    values: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, measure in cases.items():
            values[name].append(measure())
    return {name: statistics.median(figures) for name, figures in values.items()}


def scaled(figures: Figures, factor: float) -> Figures:
    """The figures in another unit."""
    return {name: factor * figure for name, figure in figures.items()}


def rounded(figure: float) -> str:
    """Three digits; all of a count."""
    return f"{figure:,}" if isinstance(figure, int) else f"{figure:,.3g}"


def show(title: str, rows: Rows, *, ratios: bool = True) -> None:
    """A table of the figures, with their ratios to the first of their row."""
    columns = dict.fromkeys(name for figures in rows.values() for name in figures)
    table = Table("", *columns, title=title, title_justify="left")
    for name, figures in rows.items():
        first = next(iter(figures.values()))
        cells = (
            "" if figure is None else rounded(figure) + (f"  {figure / first:.2f}x" if ratios else "")
            for figure in map(figures.get, columns)
        )
        table.add_row(name, *cells)
    console.print(table)


def machine() -> dict[str, Any]:
    """Facts about this machine on which the figures depend."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": gpu,
        "load": round(os.getloadavg()[0], 1),
    }


def write(path: Path | None, tables: Mapping[str, Rows], **facts: Any) -> None:
    """Print the facts of the machine, and write the tables as JSON if there is a path."""
    about = machine()
    console.print(", ".join(f"{key} {value}" for key, value in about.items()))
    if path is not None:
        path.write_text(json.dumps({"machine": about, **facts, **tables}, indent=2) + "\n")


def report(path: Path | None, measures: Mapping[str, Callable[[], Rows]]) -> None:
    """Measure, show and `write` one table after the other."""
    tables: dict[str, Rows] = {}
    for title, measure in measures.items():
        tables[title] = measure()
        show(title, tables[title])
    write(path, tables)
