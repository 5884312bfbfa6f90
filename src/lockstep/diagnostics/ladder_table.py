"""The table of a ladder: the results of its rungs, read from their run folders."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.core import log
from lockstep.core.run import Run
from lockstep.core.table import Column, show_table
from lockstep.core.tags import TRAIN_LOSS
from lockstep.records.runs import Row
from lockstep.telemetry.pictures import COLOURS, shorten, svg

NOTE = (
    "img/s: median of the repeats, and half of their range; x: speed relative to the first setup, from two repeats "
    "on; eff: the same per GPU; comm: share of the time in which gradients are exchanged; GB: peak memory of main's "
    "GPU, or of all ranks on a CPU, not measured in a run of a second; diff: largest relative difference of a logged "
    "loss from the first setup's, in the job's precision (`lockstep prove` compares in float64); code: lines that a "
    "user writes"
)

WIDEST = 20  # characters of a rung's name


def row_of(rung: str, runs: Sequence[Run], first: Row | None, *, devices: int | None, **facts: Any) -> Row:
    """The row of a rung from its runs that are done, compared with the row of the first rung.

    `devices` is the number of its GPUs; None if it has one device, or its ranks share the cores of a CPU.
    """
    summaries = [run.summary for run in runs]
    losses = dict(runs[0].series(TRAIN_LOSS)) if runs else {}
    rates = [summary["img_per_s"] for summary in summaries]
    rate = statistics.median(rates) if rates else None
    # One turn has no spread, which may be as large as the ratio.
    faster = None if rate is None or len(rates) < 2 else rate / (first or {"img_per_s": rate})["img_per_s"]
    # Of a CPU, the memory of all ranks; a run of a second does not know it.
    memory = [s["gpu_memory"] / 1e9 if "gpu_memory" in s else s.get("cpu_mem_gb") for s in summaries]
    return {
        "rung": rung,
        "img_per_s": rate,
        "spread": (max(rates) - min(rates)) / 2 if len(rates) > 1 else None,
        "speed_up": faster,
        "efficiency": faster / devices if faster is not None and devices else None,
        "communication": _median((summary.get("time") or {}).get("communication") for summary in summaries),
        "memory_gb": _median(memory),
        "top1": _median(summary.get("objective") for summary in summaries),
        "difference": largest_difference(losses, first["losses"] if first else losses),
        "losses": losses,
        **facts,
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def largest_difference(losses: Mapping[int, float], reference: Mapping[int, float]) -> float | None:
    """The largest relative difference of two curves; None without a common step."""
    pairs = [(losses[step], reference[step]) for step in losses if step in reference]
    return max((abs(loss - expected) / abs(expected) for loss, expected in pairs if expected), default=None)


def show_ladder(rows: Sequence[Row]) -> None:
    """Print the table, which fits into 80 columns, and why rungs are not in it."""

    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form).replace("%", " %")

    climbed = [row for row in rows if row["img_per_s"] is not None]
    cells = {
        "rung": lambda row: shorten(row["rung"], WIDEST),
        "img/s": lambda row: text(row["img_per_s"], ",.0f") + text(row["spread"], " ,.0f").replace(" ", " ±", 1),
        "x": lambda row: text(row["speed_up"], ".2f"),
        "eff": lambda row: text(row["efficiency"], ".0%"),
        "comm": lambda row: text(row["communication"], ".0%"),
        "GB": lambda row: text(row["memory_gb"], ".2f"),
        "top-1": lambda row: text(row["top1"], ".2f"),
        "diff": lambda row: "same" if row["difference"] == 0 else text(row["difference"], ".0e"),
        "code": lambda row: str(row["lines"]),
    }
    show_table([Column(head, [cell(row) for row in climbed]) for head, cell in cells.items()])
    for row in rows:
        if row["img_per_s"] is None:
            log.show(f"{row['rung']} is not in the table: {row['reason']}")
    log.show(NOTE)


def speed_chart(rows: Sequence[Row]) -> bytes:
    climbed = [row for row in reversed(rows) if row["img_per_s"] is not None]

    def draw(axes: Any) -> None:
        rates, spreads = ([row[key] or 0.0 for row in climbed] for key in ("img_per_s", "spread"))
        labels = ["" if row["speed_up"] is None else f"{row['speed_up']:.2f}x" for row in climbed]
        bars = axes.barh([shorten(row["rung"], 24) for row in climbed], rates, xerr=spreads, color=COLOURS[0])
        axes.bar_label(bars, labels, padding=4)
        axes.set_xlabel("images per second")
        axes.grid(visible=False, axis="y")

    return svg(draw, 6.4, 0.8 + 0.3 * len(climbed))
