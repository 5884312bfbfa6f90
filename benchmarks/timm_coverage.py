"""Which families of timm Lockstep trains: the smallest model of each, through the whole way, on the CPU.

    python benchmarks/timm_coverage.py --out coverage.jsonl                # all families; goes on with the file
    python benchmarks/timm_coverage.py --out coverage.jsonl --only resnet,vision_transformer

The model with the fewest parameters, on the smallest images that it takes, trains two steps; trains them again with
a stop and a resume between, which must end with the same bits; is exported (`torch.export`) and compared with its
original; and predicts a photo. A model of more than 200 M parameters is cut to two blocks, if its class has the
argument `depth`. Each family is a process of its own with a time limit. The results are lines of JSON, and a table.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from measure import console, parser

SIZES = (32, 64, 96, 128, 192, 224)
LIMIT_S = 600.0
LARGE, BLOCKS = 200_000_000, 2  # a model with more parameters is cut to this many blocks, if its class can be
COUNTING_S = 5.0  # the most time for counting the parameters of a family's models
SMALL = re.compile("test|atto|femto|pico|nano|tiny|xxs|xs|micro|mini|small|lite|050|b0|18")
WORDS = (
    *("dataset=fake", "dataset.examples=16", "dataset.classes=4", "batch=4", "steps=2", "augment=none"),
    *("optimizer=sgd", "optimizer.lr=0.01", "device=cpu", "launcher=inline", "launcher.threads=1"),
    *("train.eval_every=100%", "checkpoint.every=100%", "train.eval_batch=4", "logger=[]", "telemetry.report=never"),
)


def smallest(family: str) -> tuple[str, int]:
    """The model of a family with the fewest parameters, and their number. Small names are counted first."""
    import timm
    import torch

    models = [name for name in timm.list_models(module=family) if not name.endswith("_enc")]  # those give no logits
    names = sorted(models, key=lambda name: (not SMALL.search(name), name))
    sizes: dict[str, int] = {}
    end = time.monotonic() + COUNTING_S
    for name in names:
        if sizes and time.monotonic() > end:
            break
        try:
            with torch.device("meta"):
                model = timm.create_model(name, num_classes=4)
        except Exception:  # some cannot be made without data; another of the family is taken
            continue
        sizes[name] = sum(parameter.numel() for parameter in model.parameters())
    return min(sizes.items(), key=lambda item: item[1]) if sizes else (names[0], 0)


def stages(model: str, size: int, folder: Path, *words: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """The stages of the way of a model; `words` are further overrides."""
    import torch
    from PIL import Image
    from safetensors.torch import load_file

    import lockstep
    from lockstep.checkpoint.files import MODEL
    from lockstep.checkpoint.reading import latest_valid
    from lockstep.core.errors import Stopped
    from lockstep.core.run_dir import RunDir
    from lockstep.core.world import World
    from lockstep.inference import export as exporting
    from lockstep.runtime.signals import StopRequest
    from lockstep.training import experiment
    from runs import prepared

    class StopAfterStep(StopRequest):
        def requested_after_step(self) -> bool:
            return True

    def run(name: str, stop: StopRequest | None = None) -> dict[str, torch.Tensor]:
        job, run_dir = prepared(folder / name, [f"model={model}", f"dataset.size={size}", *WORDS, *words])
        try:
            experiment.run(job, run_dir, World.solo(), stop=stop)
        except Stopped:
            assert stop is not None
        newest = latest_valid(run_dir.checkpoints)
        assert newest is not None
        return load_file(newest / MODEL)

    def train() -> None:
        run("whole")

    def resume() -> None:
        run("cut", StopAfterStep())
        newest = latest_valid(RunDir(folder / "whole").checkpoints)
        assert newest is not None
        whole, resumed = load_file(newest / MODEL), run("cut")
        different = [name for name, tensor in whole.items() if not torch.equal(tensor, resumed[name])]
        assert not different, f"{len(different)} tensors differ, the first is {different[0]}"

    def export() -> None:
        exporting.export(str(folder / "whole"), [], kind="torch", pixels="uint8", out=None)

    def predict() -> None:
        predictor = lockstep.load(folder / "whole", device="cpu")
        predictor.predict(Image.new("RGB", (size + 9, size), (200, 100, 50)))

    yield from (("train", train), ("resume", resume), ("export", export), ("predict", predict))


def cover(family: str) -> dict[str, Any]:
    """What works for the smallest model of a family, in this process."""
    from lockstep.core import console
    from lockstep.core.errors import InputError
    from lockstep.models.zoo import network_options

    console.terminal.quiet = True
    model, parameters = smallest(family)
    words = [f"+model.options.depth={BLOCKS}"] * (parameters > LARGE and "depth" in network_options(model))
    row: dict[str, Any] = {"family": family, "model": model, "parameters": parameters, "options": words}
    import timm

    usual = timm.get_pretrained_cfg(model)
    for size in dict.fromkeys((*SIZES, max(usual.input_size[1:]) if usual else SIZES[-1])):
        row |= {"size": size, "failed": "", "error": ""}
        with tempfile.TemporaryDirectory(prefix="timm-coverage-") as folder:
            for name, stage in stages(model, size, Path(folder), *words):
                try:
                    stage()
                except Exception as error:
                    lines = str(error).strip().splitlines() or [""]
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    row |= {"failed": name, "error": f"{type(error).__name__}: {lines[0][:300]}"}
                    row["where"] = f"{Path(where.filename).name}:{where.lineno}"
                    if name == "train" and isinstance(error, InputError):
                        break  # perhaps it takes larger images only
                    return row
        if not row["failed"]:
            return row
    return row


def covered(family: str) -> dict[str, Any]:
    """`cover` in a process of its own."""
    command = ["nice", sys.executable, __file__, "--family", family]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        row = {"family": family, "failed": "train", "error": f"takes more than {LIMIT_S:g} s"}
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or [""])[-1]
        row = {"family": family, "failed": "train", "error": f"exit code {done.returncode}: {last[:300]}"}
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("timm_coverage.jsonl"), help="the lines of JSON")
    options.add_argument("--only", help="families, with commas between them [all]")
    options.add_argument("--processes", type=int, default=2, help="families at a time [2]")
    options.add_argument("--family", help="cover one family in this process")
    arguments = options.parse_args()
    if arguments.family:
        print(json.dumps(cover(arguments.family)))
        return
    import timm

    families = arguments.only.split(",") if arguments.only else timm.list_modules()
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    left = [family for family in families if family not in {row["family"] for row in rows}]
    with ThreadPoolExecutor(arguments.processes) as pool, arguments.out.open("a") as out:
        for done in as_completed([pool.submit(covered, family) for family in left]):
            rows.append(row := done.result())
            out.write(json.dumps(row) + "\n")
            out.flush()
            result = row.get("failed") or "works"
            console.print(f"{row['family']:<28}{row.get('model', ''):<40}{result}", soft_wrap=True)
    failed = [row for row in rows if row.get("failed")]
    console.print(f"{len(rows) - len(failed)} of {len(rows)} families work with timm {timm.__version__}")
    for row in failed:
        console.print(f"  {row['family']}: {row.get('model', '')} {row['failed']}: {row['error']}", soft_wrap=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
