"""What one purpose takes of the source: what the step imports, what the default job loads, and what its start runs.

    python benchmarks/house.py --json house.json

Every figure is a count, so a busy machine gives the same ones.

- `step`: the modules and lines of Lockstep that `import lockstep.training.train_step` loads.
- `job`: the modules and lines that the default job has loaded at its end.
- `start`: before the first step of the default job, the files with functions that run in its main thread, and how
  often a call goes from one file to another. What runs while a module is imported does not count.
- `source`: the lines of `src` in all, and how often an option is asked with `getattr(option, "name", default)`.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lockstep"
FIRST_STEP = str(PACKAGE / "training" / "train_step.py")


def loaded() -> dict[str, int]:
    """The modules of Lockstep that this process has loaded, and the lines of each."""
    files = ((name, getattr(module, "__file__", None)) for name, module in [*sys.modules.items()])
    return {name: lines(Path(file)) for name, file in files if file and Path(file).is_relative_to(PACKAGE)}


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def trace(report: str, root: str) -> None:
    """Run the default job for an epoch in this process, and write its figures to the file `report`."""
    files, changes, last, importing, started = set[str](), 0, "", 0, False

    def called(frame: FrameType, event: str, _: object) -> None:
        nonlocal changes, last, importing, started
        file = frame.f_code.co_filename
        if started or event not in ("call", "return") or not file.startswith(str(PACKAGE)):
            return
        if frame.f_code.co_name == "<module>":
            importing += 1 if event == "call" else -1
        if importing or event == "return":
            return
        started = file == FIRST_STEP and frame.f_code.co_name == "__call__"
        files.add(file)
        changes, last = changes + (file != last), file

    def write() -> None:
        sys.setprofile(None)
        modules = loaded()
        figures = {
            "job": {"modules": len(modules), "lines": sum(modules.values())},
            "start": {"files": len(files), "changes": changes},
        }
        if started:
            Path(report).write_text(json.dumps(figures))

    atexit.register(write)  # the command leaves without a return
    sys.argv = ["train.py", "device=cpu", "epochs=1", "telemetry.report=never", f"output_root={root}"]
    os.chdir(ROOT)
    sys.setprofile(called)
    runpy.run_path("train.py", run_name="__main__")


def of_step() -> dict[str, int]:
    """What importing the step loads, in a process of its own."""
    code = "import house, lockstep.training.train_step; print(*house.loaded().values())"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True, capture_output=True)
    counts = [int(count) for count in done.stdout.split()]
    return {"modules": len(counts), "lines": sum(counts)}


def of_job() -> dict[str, Any]:
    """What the default job loads, and what its start runs."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        code = f"import house; house.trace({str(report)!r}, {str(Path(folder) / 'outputs')!r})"
        done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
        assert report.is_file(), f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
        figures: dict[str, Any] = json.loads(report.read_text())
        return figures


def of_source() -> dict[str, int]:
    """Counts over the text of the source."""
    sources = [*(ROOT / "src").rglob("*.py")]
    calls = (node for path in sources for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    questions = [call for call in calls if ast.unparse(call.func) == "getattr" and len(call.args) == 3]
    return {
        "lines": sum(map(lines, sources)),
        "getattr": sum(isinstance(call.args[1], ast.Constant) for call in questions),
    }


def measured() -> dict[str, Any]:
    return {"step": of_step(), **of_job(), "source": of_source()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    figures = measured()
    for name, counts in figures.items():
        print(f"{name:8}" + ", ".join(f"{count:,} {unit}" for unit, count in counts.items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
