"""Tests Lockstep's promises on this machine's GPU, with one command, in ten minutes.

    python benchmarks/gpu_check.py --json gpu_check.json            # all steps
    python benchmarks/gpu_check.py --only strict,resume             # some of them
    python benchmarks/gpu_check.py --device cpu                     # the steps that need no GPU, with small jobs

It is made for a machine with one card, torch 2.11 or newer and no network. On another machine, with a network, fetch
the wheels that are missing there; the versions are those of pyproject.toml. 3.12 stands for the machine's Python:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
        --platform manylinux_2_17_x86_64 --dest wheels "hydra-core==1.4.0rc3" "omegaconf==2.4.1rc1" "simplejpeg<2" \\
        "timm<1.1" "tensorboard<2.22" "nvidia-ml-py<14" "scikit-learn<1.10" "safetensors<0.9" "rich<16" \\
        "filelock<5" "psutil<8" "pyyaml<7" "torchmetrics<2" lightning-utilities "jinja2<4" markupsafe \\
        "matplotlib<4" contourpy cycler fonttools kiwisolver pyparsing python-dateutil six

Then, on the machine with the card and in the checkout:

    python -m pip install --no-index --no-deps --target packages wheels/*.whl
    PYTHONPATH=$PWD/packages:$PWD/src python benchmarks/gpu_check.py --json gpu_check.json

Each step is a process with a time limit, so that a hang or a crash of one does not affect the others. The verdict is
`passed`, `FAILED`, `left out` (something that the step needs is missing) or `figures` (the step only measures). The
exit code is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

import gpu_rates
import gpu_steps
from gpu_jobs import MARK, ROOT, Failed, Place, kill, marked
from lockstep.core.safe_write import write_atomic
from measure import Rows, console, parser, write

# The number of lines that are shown from the end of a failed step's output.
SHOWN = 30
COLOURS = {"passed": "green", "FAILED": "red", "left out": "yellow", "figures": "cyan"}


@dataclass(frozen=True)
class Step:
    """A step of the check.

    Fields:
        title: what the step checks.
        limit_s: its time limit in seconds.
        call: runs the step; returns a sentence, or figures if it only measures.
        gpu_only: why the step cannot run on a CPU; empty if it can.
    """

    title: str
    limit_s: float
    call: Callable[[Place], str | Rows]
    gpu_only: str = ""


@dataclass(frozen=True)
class Verdict:
    """How a step ended: `finding` is its sentence, or its figures as text."""

    verdict: str
    finding: str
    figures: Rows = field(default_factory=dict)
    seconds: float = 0.0


STEPS = {
    "default": Step("the default job learns", 120, gpu_steps.default),
    "strict": Step("repro=strict twice", 180, gpu_steps.strict),
    "half": Step("16 bits next to float32", 120, gpu_steps.half),
    "hooks": Step("DDP and its hooks, a group of one", 120, gpu_steps.hooks),
    "parts": Step("FSDP, a group of one", 120, gpu_steps.parts),
    "stages": Step("a pipeline of two stages on one device over gloo", 240, gpu_steps.stages),
    "ranks": Step("two ranks on one device over gloo", 240, gpu_steps.ranks),
    "resume": Step("resumes to the bit", 300, gpu_steps.resume),
    "graph": Step("train.cuda_graph next to launched steps", 120, gpu_steps.graph, "a CPU has no CUDA graphs"),
    "memory": Step("out of memory", 120, gpu_steps.out_of_memory, "it is a GPU whose memory is limited"),
    "stop": Step("SIGTERM and resume", 150, gpu_steps.stop),
    "nvml": Step("NVML next to nvidia-smi", 60, gpu_steps.nvml, "there is no GPU to watch"),
    "model": Step("a timm model next to a raw loop", 600, gpu_rates.model),
    "speedrun": Step("the speed recipe next to its reference", 300, gpu_rates.speedrun),
    "host": Step("launches, host time and syncs of a step", 180, gpu_rates.host),
}


def verdict(step: Step, place: Place) -> Verdict:
    """Run a step in this process."""
    try:
        outcome = step.call(place)
    except Failed as sentence:
        return Verdict("FAILED", str(sentence))
    except Exception as error:  # one step's error must not hide what the others find
        traceback.print_exc()
        return Verdict("FAILED", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    if isinstance(outcome, str):
        return Verdict("passed", outcome)
    rows = (
        f"{name}: " + ", ".join(f"{column} {short(figure)}" for column, figure in figures.items())
        for name, figures in outcome.items()
    )
    return Verdict("figures", "; ".join(rows), outcome)


def short(figure: float) -> str:
    """A figure with four digits, or as a whole number from 1,000 on."""
    return f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.4g}"


def apart(name: str, device: str, left_s: float) -> Verdict:
    """Run a step in its own process group, for `left_s` seconds at most, and then kill what is left of it."""
    began = time.perf_counter()
    limit_s = STEPS[name].limit_s
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as text:
        folder = Path(text)
        output, result = folder / "output.txt", folder / "verdict.json"
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, __file__, "--device", device, "--only", name, "--step-in", text],
                cwd=ROOT,
                env={**os.environ, MARK: text, "OMP_WAIT_POLICY": "passive"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code = process.wait(min(limit_s, left_s))
            ended = Verdict("FAILED", f"the step's process ended with {code}")
        except subprocess.TimeoutExpired:
            ended = Verdict("FAILED", f"not done within {limit_s:.0f} s")
            if left_s < limit_s:
                ended = Verdict("left out", f"--budget ended it after {left_s:.0f} s")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kill(marked(folder))
        if result.exists():
            ended = Verdict(**json.loads(result.read_text()))
        if ended.verdict == "FAILED":
            console.print(
                f"the end of the output of {name}:", *output.read_text().splitlines()[-SHOWN:], sep="\n", markup=False
            )
    return Verdict(ended.verdict, ended.finding, ended.figures, round(time.perf_counter() - began, 1))


def show(verdicts: dict[str, Verdict]) -> None:
    """The table of all steps."""
    table = Table("step", "verdict", "seconds", "found", title="gpu_check", title_justify="left")
    for name, step in verdicts.items():
        coloured = f"[{COLOURS[step.verdict]}]{step.verdict}[/]"
        table.add_row(f"{name}: {STEPS[name].title}", coloured, f"{step.seconds:.1f}", escape(step.finding))
    console.print(table)


def names(text: str) -> list[str]:
    """Names of steps with commas between them."""
    if unknown := [name for name in text.split(",") if name not in STEPS]:
        raise argparse.ArgumentTypeError(f"there is no step {unknown[0]!r}; the steps are {', '.join(STEPS)}")
    return text.split(",")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", type=names, default=list(STEPS), metavar="STEP[,STEP]", help=", ".join(STEPS))
    options.add_argument("--device", choices=["cpu", "cuda"], help="[cuda, where there is one]")
    options.add_argument("--budget", type=float, metavar="SECONDS", help="leave out steps that are not done by then")
    options.add_argument("--step-in", type=Path, help=argparse.SUPPRESS)  # be the process of one step
    arguments = options.parse_args()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA GPU here; --device cpu runs the steps that need none", file=sys.stderr)
        return 2
    if arguments.step_in is not None:
        (name,) = arguments.only
        ended = verdict(STEPS[name], Place(device, arguments.step_in))
        write_atomic(
            arguments.step_in / "verdict.json", json.dumps(asdict(ended))
        )  # it may be killed while it writes
        return 0
    began = time.perf_counter()
    verdicts: dict[str, Verdict] = {}
    for name in arguments.only:
        left_s = float("inf") if arguments.budget is None else began + arguments.budget - time.perf_counter()
        if left_s <= 0:
            verdicts[name] = Verdict("left out", f"the {arguments.budget:.0f} s of --budget are over")
            continue
        if device == "cpu" and STEPS[name].gpu_only:
            verdicts[name] = Verdict("left out", STEPS[name].gpu_only)
            continue
        verdicts[name] = apart(name, device, left_s)
        console.print(f"{name}: {verdicts[name].verdict}, {verdicts[name].seconds:.1f} s", markup=False)
    show(verdicts)
    write(arguments.json, {}, device=device, steps={name: asdict(step) for name, step in verdicts.items()})
    return int(any(step.verdict == "FAILED" for step in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
