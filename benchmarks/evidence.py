"""Runs what a CPU can measure, in about an hour, and writes the tables of docs/evidence/benchmarks.md and README.md.

    python benchmarks/evidence.py --data DATA
    python benchmarks/evidence.py --data DATA --quick              # in less than 25 minutes: fewer repeats
    python benchmarks/evidence.py --only overhead input            # some parts, and the others as they were
    python benchmarks/evidence.py --documents                      # writes the tables of figures.json again

Each part is a script or a command of Lockstep. DATA has `MNIST/raw`, `cifar10` (JPEG files in `train/CLASS` and
`test/CLASS`) and `photos` (larger JPEG files in folders of classes); parts without their data are skipped. So are the
rows of frameworks that are not installed (benchmarks/requirements-peers.txt), or without their scripts in `timm` and
`torchvision` (see photos.py). A sentence says what is skipped.

The last figures of each part are in docs/evidence/figures.json. Where a ratio of Lockstep to the first contender of
its row is worse than the last one by more than NOISE, the table says so. Take a quiet machine: the load is recorded.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measure import SPREAD, Figures, Rows, machine, parser

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from reference import splice, table  # noqa: E402

Tables = dict[str, Rows]
Place = tuple[str, str, str]  # the title, the row and the contender of a figure
FIGURES, BENCHMARKS = "docs/evidence/figures.json", "docs/evidence/benchmarks.md"
NOISE = 0.15  # repeats on one machine differ by up to 11 %
PEERS = ("accelerate", "lightning", "transformers")
PACKAGES = ("torch", "torchvision", "timm", *PEERS)
# The contenders that are ours, by the beginnings of their names.
OURS = (
    "lockstep",
    "streaming",
    "resident",
    "packed",
    "resumed",
    "elastic",
    "one device",
    "ddp",
    "--cfg job",
    "--help",
)
HIGHER_IS_BETTER = ("img/s", "top-1")


def of_script(out: Path, _: str) -> Tables:
    """The tables that a script has written with `--json`."""
    written = json.loads((out / "figures.json").read_text())
    return {title: rows for title, rows in written.items() if isinstance(rows, dict) and _is_rows(rows)}


def _is_rows(rows: Mapping[str, Any]) -> bool:
    return bool(rows) and all(isinstance(figures, dict) for figures in rows.values())


def of_overhead(out: Path, printed: str) -> Tables:
    """The microseconds of a step, the contenders side by side."""
    ((title, rows),) = of_script(out, printed).items()
    return {"us per step": {title: {name: figures["us per step"] for name, figures in rows.items()}}}


def of_networks(out: Path, printed: str) -> Tables:
    """The figures of photos.py without their spread."""
    return {title: rows for title, rows in of_script(out, printed).items() if not title.endswith(SPREAD)}


def of_ladder(_: Path, printed: str) -> Tables:
    """Images per second and accuracy of each setup, the tutorial's own loop first."""
    setups = sorted(json.loads(printed), key=lambda setup: setup["rung"] != "plain loop")
    names = {"img/s": "img_per_s", "top-1, %": "top1"}
    return {
        title: {"mnist_tutorial": {s["rung"]: s[key] for s in setups if s[key] is not None}}
        for title, key in names.items()
    }


def of_prove(_: Path, printed: str) -> Tables:
    """The number of runs, and of those that pass."""
    verdicts = [row["verdict"] for row in json.loads(printed)]
    return {"runs": {"lockstep prove": {"compared": len(verdicts), "pass": verdicts.count("pass")}}}


def of_run(out: Path, _: str) -> Tables:
    """The accuracy and the seconds of one run."""
    summary = json.loads(((out / "run") / "summary.json").read_text())
    return {
        "the run": {"": {"top-1, %": summary["best"], "img/s": summary["img_per_s"], "seconds": summary["seconds"]}}
    }


def of_fine_tuning(_: Path, printed: str) -> Tables:
    """The line that fine_tuning.py prints."""
    top1, seconds = map(float, re.findall(r"([\d.]+) % top-1 in (\d+) s", printed)[0])
    return {"the run": {"": {"top-1, %": top1, "seconds of processor time": seconds}}}


@dataclass(frozen=True)
class Part:
    """A command after `python`, in which `{}` stands for the words `full` or, with `--quick`, for `quick`.

    Fields:
        read: makes tables of the folder OUT and of what the command prints.
        data: the folder of DATA that it needs.
        has_ratios: whether the first contender of a row is what the others are compared with.
    """

    line: str
    full: str = ""
    quick: str = ""
    read: Callable[[Path, str], Tables] = of_script
    data: str = ""
    has_ratios: bool = True


RECIPE = "train.py experiment={} model.compile=false dataset=folder dataset.path=DATA/cifar10/train epochs=1 {{}} "
RECIPE += "dataset.val_folder=../test dataset.decode_size=32 telemetry.report=never hydra.run.dir=OUT/run"
LADDER = "-m lockstep ladder experiment=mnist_tutorial data_root=DATA output_root=OUT --json {} "
SCRIPTS = {  # of tutorials and of other frameworks, and the package that each needs
    "plain": "torch",
    "tutorial_ddp": "torch",
    "accelerate_loop": "accelerate",
    "lightning_trainer": "lightning",
    "hf_trainer": "transformers",
}
LADDER += " ".join(f"--script benchmarks/peers/{name}.py" for name, of in SCRIPTS.items() if find_spec(of))
NETWORKS = "benchmarks/photos.py --photos DATA/photos --timm DATA/timm --torchvision DATA/torchvision "
NETWORKS += "--models resnet18 --precisions fp32 --device cpu {}"
PARTS = {
    "overhead": Part("benchmarks/overhead.py {}", "--repeats 7", "--repeats 3", of_overhead),
    "overhead-basicnet": Part(
        "benchmarks/overhead.py --model basicnet {}",
        "--examples 3840 --repeats 3",
        "--examples 1280 --repeats 2",
        of_overhead,
    ),
    "input": Part("benchmarks/input.py {}", "--repeats 7", "--repeats 1"),
    "networks": Part(NETWORKS, "--repeats 2", "--repeats 1 --seconds 20 --files 2000", of_networks, "photos"),
    "ladder": Part(LADDER, "--repeat 2", "--repeat 1 --only ddp,fsdp,plain-loop,plain-ddp", of_ladder, "MNIST"),
    "startup": Part("benchmarks/startup.py {}", "--repeats 5", "--repeats 2"),
    "checkpoints": Part("benchmarks/checkpoint.py {}", "--repeats 9", "--repeats 3"),
    "dropout": Part("benchmarks/exactness.py"),
    "fine-tuning": Part(
        "benchmarks/fine_tuning.py lockstep OUT/photos {}",
        *("--epochs 3", "--epochs 1"),
        read=of_fine_tuning,
        data="cifar10",
        has_ratios=False,
    ),
    **{
        recipe: Part(
            RECIPE.format(recipe), quick=f"dataset.limit={limit}", read=of_run, data="cifar10", has_ratios=False
        )
        for recipe, limit in (("cifar10_speedrun", 5000), ("cifar10_resnet34_modern", 1000))
    },
    "soak": Part(
        "benchmarks/reliability/soak.py --ranks 1 2 {}", "--kills 20", "--kills 4 --steps 120", has_ratios=False
    ),
    "prove": Part("-m lockstep prove --ranks 2 --json {}", "--steps 6", "--steps 3", read=of_prove, has_ratios=False),
}
PEERS_IN = ("overhead", "overhead-basicnet", "networks")


JPEG = "to the model, img/s of a core"
STEP = "seconds to the first step"
LOOP, NETWORK = ("us per step", "linear, batch 64"), ("img/s, batch 32, cpu", "resnet18, fp32")
# README.md's rows: of each part, its sentence in pieces with the place of the ratio of each. Without its contender, a
# piece is left out.
RESULTS: dict[str, dict[str, Place]] = {
    "overhead": {
        "linear model: a step takes {} of a bare loop's time": (*LOOP, "Lockstep"),
        "Accelerate {}": (*LOOP, "Accelerate"),
        "Fabric {}": (*LOOP, "Fabric"),
        "HF Trainer {}": (*LOOP, "HF Trainer, no logging"),
        "Lightning {}": (*LOOP, "Lightning, no logging"),
    },
    "overhead-basicnet": {
        "the network of the MNIST tutorials: a step takes {} of a bare loop's time": (
            "us per step",
            "basicnet, batch 64",
            "Lockstep",
        ),
    },
    "ladder": {
        "MNIST tutorial: {} the images per second of the tutorial's own loop": (
            "img/s",
            "mnist_tutorial",
            "one device",
        ),
    },
    "input": {
        "reading JPEGs, per core: {} torchvision's recipe at 32x32": (
            JPEG,
            "32x32 JPEG, crop and mirror",
            "streaming",
        ),
        "{} at 500x375": (JPEG, "500x375 JPEG, box to 224", "streaming"),
    },
    "networks": {
        "ResNet-18 at 224, images per second of Lockstep's: Lightning {}": (*NETWORK, "Lightning"),
        "timm {}": (*NETWORK, "timm"),
        "torchvision {}": (*NETWORK, "torchvision"),
    },
    "startup": {
        "start to first step: {} of a plain script's time": (STEP, "basicnet", "Lockstep"),
        "on two ranks {} of torchrun's with DDP": (STEP, "basicnet, 2 ranks", "Lockstep"),
    },
    "checkpoints": {
        "a checkpoint: training waits {} as long as with `dcp.async_save`": (
            "a save, ms",
            "stands still",
            "lockstep",
        ),
    },
}


def measure(name: str, part: Part, data: Path | None, *, quick: bool) -> dict[str, Any] | str:
    """The figures of a part, with what they depend on; a sentence if it is skipped or fails."""
    if part.data and (data is None or not (data / part.data).is_dir()):
        return f"{name} is skipped: there is no DATA/{part.data}"
    line = part.line.format(part.quick if quick else part.full).strip()
    with tempfile.TemporaryDirectory() as folder:
        if name == "fine-tuning" and data is not None:
            few_photos(data / "cifar10", Path(folder, "photos"))
        places = {"DATA": str(data and data.absolute()), "OUT": folder}
        words = [re.sub(r"\b(DATA|OUT)\b", lambda found: places[found[0]], word) for word in shlex.split(line)]
        writes = ["--json", f"{folder}/figures.json"] if part.read in (of_script, of_overhead, of_networks) else []
        began = time.monotonic()
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, *words, *writes],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            return f"{name} failed with exit code {done.returncode}: python {line}"
        tables = {title: shortened(rows) for title, rows in part.read(Path(folder), done.stdout).items()}
    versions = {package: version(package) for package in PACKAGES if find_spec(package)}
    about = {**machine(), **versions, "cpu": processor(), "seconds": round(time.monotonic() - began)}
    return {"command": f"python {line}".replace("python -m lockstep", "lockstep"), **about, "tables": tables}


def few_photos(cifar10: Path, folder: Path) -> None:
    """A folder with the first 60 photos of each class for training and 30 for evaluation."""
    for split, of, images in (("train", "train", 60), ("val", "test", 30)):
        for places in sorted((cifar10 / of).iterdir()):
            (target := folder / split / places.name).mkdir(parents=True)
            for path in sorted(places.iterdir())[:images]:
                (target / path.name).symlink_to(path.resolve())


def processor() -> str:
    """The name of the processor, as Linux knows it."""
    known = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", known.read_text()) if known.exists() else []
    return names[0] if names else "unknown processor"


def shortened(rows: Rows) -> Rows:
    """The figures with four digits."""
    return {
        row: {name: value if isinstance(value, int) else float(f"{value:.4g}") for name, value in figures.items()}
        for row, figures in rows.items()
    }


def ratios(tables: Tables) -> dict[Place, float]:
    """The ratio of each figure to the first of its row."""
    return {
        (title, row, name): value / first
        for title, rows in tables.items()
        for row, figures in rows.items()
        for name, value in figures.items()
        if (first := next(iter(figures.values())))
    }


def fallen_behind(tables: Tables, last: Tables) -> list[str]:
    """A sentence for each ratio of ours that is worse than the last one by more than the noise.

    A row whose first contender is another one than before is not compared.
    """
    before, sentences = ratios(last), []
    for place, ratio in ratios(tables).items():
        title, row, name = place
        if not (name.lower().startswith(OURS) and ratio and before.get(place)):
            continue
        if next(iter(tables[title][row])) != next(iter(last[title][row])):
            continue
        worse = before[place] / ratio if any(word in title for word in HIGHER_IS_BETTER) else ratio / before[place]
        if worse > 1 + NOISE:
            sentences.append(f"{title}, {row}, {name}: {ratio:.2f}x, and {before[place]:.2f}x the time before")
    return sentences


def place_of(facts: Mapping[str, Any]) -> str:
    """When and where a part was measured."""
    packages = ", ".join(f"{package} {facts[package]}" for package in PACKAGES if package in facts)
    load = f" under a load of {facts['load']}" if "load" in facts else ""
    return f"{facts['date']}, {facts['cores']} cores of {facts['cpu']}{load}, {packages}"


def as_markdown(facts: Mapping[str, Any]) -> str:
    """The tables of a part with their command, date and machine. Tables of one row with one name are one table."""
    texts, single = [f"`{facts['command']}`, {place_of(facts)}:"], dict[str, Rows]()
    for title, rows in facts["tables"].items():
        if len(rows) == 1:
            ((row, figures),) = rows.items()
            single.setdefault(row, {})[title] = figures
        else:
            names = dict.fromkeys(name for figures in rows.values() for name in figures)
            lines = ([row, *(cell(figures, name) for name in names)] for row, figures in rows.items())
            texts.append(table([title, *names], lines))
    for row, titles in single.items():
        names = dict.fromkeys(name for figures in titles.values() for name in figures)
        lines = ([name, *(cell(figures, name) for figures in titles.values())] for name in names)
        texts.append(table([row, *titles], lines))
    if behind := facts.get("behind"):
        texts.append(f"**Behind the last time ({facts['last']}):** " + "; ".join(behind) + ".")
    return "\n\n".join(texts)


def cell(figures: Figures, name: str) -> str:
    """A figure, with its ratio to the first of its row."""
    if name not in figures:
        return ""
    first = next(iter(figures))
    ratio = f" ({figures[name] / figures[first]:.2f}x)" if name != first and figures[first] else ""
    return digits(figures[name]) + ratio


def table_of_runs(parts: Mapping[str, Any]) -> str:
    """The parts whose figures are compared with nothing, one in a row."""
    rows = []
    for facts in (parts[name] for name, part in PARTS.items() if name in parts and not part.has_ratios):
        figures = [figures for rows in facts["tables"].values() for figures in rows.values()]
        texts = [", ".join(f"{name} {digits(value)}" for name, value in row.items()) for row in figures]
        rows.append([f"`{facts['command']}`", "; ".join(texts), place_of(facts)])
    return table(["command", "figures", "when and where"], rows) if rows else "Not measured yet."


def digits(figure: float) -> str:
    """Three digits, without an exponent; all of a count."""
    return f"{figure:,}" if isinstance(figure, int) else f"{float(f'{figure:.3g}'):,.12g}"


def result_rows(parts: Mapping[str, Any]) -> str:
    """README.md's rows whose figures are measured here."""
    rows = []
    for name, pieces in RESULTS.items():
        known = ratios(parts[name]["tables"])
        texts = [piece.format(f"{known[place]:.2f}x") for piece, place in pieces.items() if place in known]
        data = " --data DATA" * bool(PARTS[name].data)
        line = f"`python benchmarks/evidence.py --only {name}{data}`"
        rows.append([", ".join(texts), line, parts[name]["date"]])
    return table(["figure", "command", "date"], rows)


def documents(root: Path = ROOT) -> dict[Path, str]:
    """The text that each document should have, by figures.json."""
    parts = json.loads((root / FIGURES).read_text())
    benchmarks, readme = root / BENCHMARKS, root / "README.md"
    text = fill(benchmarks, benchmarks.read_text(), "runs", table_of_runs(parts))
    for name in (name for name, part in PARTS.items() if part.has_ratios):
        text = fill(benchmarks, text, name, as_markdown(parts[name]) if name in parts else "Not measured yet.")
    return {benchmarks: text, readme: fill(readme, readme.read_text(), "results", result_rows(parts))}


def fill(path: Path, text: str, name: str, body: str) -> str:
    """The text of a document in which `body` replaces the part of this name."""
    return splice(
        path, text, f"<!-- written by benchmarks/evidence.py: {name} -->\n", "<!-- end -->\n", f"\n{body}\n\n"
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, help="MNIST/raw, cifar10 and photos")
    options.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME", help=" ".join(PARTS)
    )
    options.add_argument("--quick", action="store_true", help="fewer repeats and less data: 25 minutes")
    options.add_argument("--documents", action="store_true", help="measure nothing, write the documents")
    arguments = options.parse_args()
    store = ROOT / FIGURES
    parts, failed = json.loads(store.read_text()), False
    absent = [package for package in PEERS if not find_spec(package)]
    for name in [] if arguments.documents else arguments.only:
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        if absent and name in PEERS_IN:
            print(f"  without {', '.join(absent)}: pip install -r benchmarks/requirements-peers.txt")
        facts = measure(name, PARTS[name], arguments.data, quick=arguments.quick)
        if isinstance(facts, str):
            print(f"  {facts}", flush=True)
            failed |= "failed" in facts
            continue
        if PARTS[name].has_ratios and (last := parts.get(name)):
            facts["behind"] = fallen_behind(facts["tables"], last["tables"])
            facts["last"] = f"{last['date']}, {last['cpu']}"
        print(as_markdown(facts) if PARTS[name].has_ratios else table_of_runs({name: facts}), flush=True)
        parts[name] = facts
        store.write_text(json.dumps(parts, indent=1) + "\n")
    for path, text in documents().items():
        path.write_text(text)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(parts, indent=2) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
