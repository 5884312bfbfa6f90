"""Unusual command lines: for each, train.py starts, or says in one sentence why not.

    python benchmarks/reliability/fuzz_command_line.py
    python benchmarks/reliability/fuzz_command_line.py --overrides 500 --seed 3

Each case goes the whole way of `python train.py OVERRIDES`, up to the launch of the ranks, in one process for many
cases. It must end with 0 or 2, without a traceback, and a refused command must leave no files. Keys come from the
schema and from every option of every group. Values are numbers at and beyond the ends of every range, other types,
texts, paths and nested values. The cases run in a child process under observation, so that a crash or a hang is
detected.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).parents[2] / "train.py"
CONF = TRAIN.parent / "conf"
STARTS_S, HANGS_S = 600.0, 120.0  # time limits: for the imports, and for one case
RESULTS = "results.jsonl"
ROOM = 2.0**28  # bytes of memory that a case is told to be available


def tokens(text: str) -> list[str]:
    """The words of a text: short to write, many to a line."""
    return text.split()


NUMBERS = tokens("0 1 -1 2 3 7 64 255 1024 65536 999999 1000000 100000 2147483648 1e9")
NUMBERS += ["9223372036854775807", "9223372036854775808", "1e30", "1" + "0" * 30, "9" * 299, "9" * 400, "9" * 5000]
NUMBERS += tokens("0.5 1.0 -0.1 1e-300 1e-320 1e308 1e400 -1e400 nan -nan inf -inf .inf 1_0")
NUMBERS += tokens("0x10 0b1 1e +5 ٣ ½ 1,000 007")
DURATIONS = ["1ep", "0ep", "5%", "0%", "101%", "-1ep", "1.5", "0.5ep", "9" * 30 + "ep", "9" * 400 + "ep", "10min"]
DURATIONS += ["0s", "1e3s", "500h", "501h", "9" * 20 + "h", "1 ep", "ep", "%", "min", "1day", "infep", "nan%"]
WORDS = tokens("auto null none true false True yes latest exact strict cpu cuda default")
WORDS += ["''", '""', "", "' '", "~", "???", "${name}", "${epochs}", "${oc.env:HOME}", "${now:%Y}", "${", r"\${name}"]
WORDS += tokens("${hydra:job.num} ${train} ${model.width} file square nccl gloo lamb adamw max_autotune")
PATHS = ["/dev/null", "/dev/null/x", "/proc/nowhere", "/proc/self/mem", "/etc/passwd", ".", "..", "/", "a/b", "fifo"]
PATHS += ["file", "file/x", "~", "~nobody-here/x", "a" * 255, "a" * 256, "a/" * 3000, "b" * 5000, "photos", "loop"]
NESTED = tokens("[] {} [1,2] [a,b] [[1],[2]] {a:1} {a:{b:[1]}} [0.1,0.9] [0.9,0.1] [nan,inf] [1,a]")
NESTED += ["[" * 25 + "]" * 25, "[" * 1000, "[" * 300 + "]" * 300, "{a:" * 200 + "1" + "}" * 200]
NESTED += ["[" + "1," * 300 + "1]"]
NESTED += tokens("(1) 1,2 choice(1,2) range(1,3) int(3.9) float(1) str(1) sort(2,1) glob(*) shuffle(1)")
NESTED += ["[null]", "{}{}", "]", "[1", "'a", "a'", '"a', "a=b", "="]
NESTED += ["a b", "a\tb", "a\nb", "é", "😀", "\u202e", "\udc80", "'\udc80'", "'\x1b[2J'"]
USUAL = tokens("epochs=3 steps=5 batch=32 seed=7 device=cpu name=mine train.ema=0.9 train.mixup=0.2")
USUAL += tokens("loader=streaming augment=crop_flip optimizer=sgd optimizer=muon schedule=step precision=bf16")
USUAL += tokens("strategy=ddp launcher=spawn launcher.ranks=2 checkpoint.every=10min telemetry.interval=10%")
USUAL += tokens("model=linear model=whitenet repro=strict train.micro_batches=2 dataset.input_size=16 batch=auto")
HYDRA = tokens("hydra.run.dir hydra.sweep.dir hydra.sweep.subdir hydra.job.name hydra.output_subdir hydra.job.chdir")
HYDRA += tokens("hydra.searchpath hydra.run hydra.job hydra hydra.runtime.cwd hydra.mode")


def option_keys() -> list[tuple[str, str]]:
    """Every key, with the override that chooses its option first (empty if the key always exists)."""
    import yaml

    from lockstep.config import schema

    keys = [(field.name, "") for field in dataclasses.fields(schema.Job)]
    for name, block in (
        ("train", schema.TrainBlock),
        ("checkpoint", schema.CheckpointBlock),
        ("telemetry", schema.TelemetryBlock),
    ):
        keys += [(f"{name}.{field.name}", "") for field in dataclasses.fields(block)]
    for group in schema.GROUPS:
        for path in sorted((CONF / group).glob("*.yaml")):
            keys += [(f"{group}.{key}", f"{group}={path.stem}") for key in yaml.safe_load(path.read_text())]
    keys += [
        (f"model.{key}", "model=resnet18") for key in ("name", "pretrained", "drop_rate", "drop_path_rate", "options")
    ]
    keys += [("model.options.x", "model=resnet18"), ("optimizer.options.x.y", "optimizer=timm")]
    return keys + [(key, "") for key in HYDRA]


def command_lines() -> Any:
    """A Hypothesis strategy for the words after `python train.py`."""
    from hypothesis import strategies as st

    from lockstep.config import schema

    keys = st.sampled_from(option_keys())
    values = st.one_of(
        *map(st.sampled_from, (NUMBERS, DURATIONS, WORDS, PATHS, NESTED)),
        st.integers().map(str),
        st.floats().map(str),
        st.text(st.characters(exclude_characters="\0", exclude_categories=()), max_size=12),
    )
    prefixes = st.sampled_from(["", "", "", "", "", "+", "++", "~"])

    def given_key(draw: Any) -> list[str]:
        (key, option), prefix, value = draw(keys), draw(prefixes), draw(values)
        return [option] * bool(option) + [f"{prefix}{key}" if prefix == "~" else f"{prefix}{key}={value}"]

    def given_option(draw: Any) -> list[str]:
        group = draw(st.sampled_from([*schema.GROUPS, "experiment"]))
        names = [path.stem for path in sorted((CONF / group).glob("*.yaml"))]
        extra = ["resnet18", "vit_tiny_patch16_224"] if group == "model" else []
        return [f"{draw(prefixes)}{group}={draw(st.one_of(st.sampled_from(names + extra), values))}"]

    @st.composite
    def lines(draw: Any) -> list[str]:
        words: list[str] = draw(st.lists(st.sampled_from(USUAL), max_size=5))
        for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 3]))):
            words += draw(st.sampled_from([given_key, given_key, given_key, given_option]))(draw)
        return words + [draw(values)] * (draw(st.integers(0, 19)) == 0)

    return lines()


def places(folder: Path) -> None:
    """Create the files that the values in `PATHS` name: a file, a pipe, a link to itself, photos."""
    import torch
    from torchvision.io import write_jpeg

    (folder / "file").write_text("")
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    for split in ("train", "val"):
        for label in "ab":
            (folder / "photos" / split / label).mkdir(parents=True)
            write_jpeg(torch.zeros(3, 8, 8, dtype=torch.uint8), str(folder / "photos" / split / label / "0.jpg"))


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in ("file", "fifo", "loop", "photos"))


@contextlib.contextmanager
def short_of_training() -> Iterator[None]:
    """Make jobs end before their ranks are launched, and pretend to have no network and little memory.

    A command then ends with an exception instead of ending this process.
    """
    from lockstep.data.datasets.builtin import Published
    from lockstep.launcher.inline import Inline
    from lockstep.runtime import host, program

    def offline(self: object) -> None:
        raise RuntimeError("no network")

    program.leave = sys.exit  # type: ignore[assignment]
    program.finish = lambda: sys.exit(0)
    host.available_memory = lambda: ROOM
    Published.fetch = offline  # type: ignore[method-assign]
    Inline.launch = lambda self, entry, run_dir: None  # type: ignore[method-assign]
    yield


def attempt(words: list[str], folder: Path) -> tuple[int, str]:
    """Run a command line; returns its exit code and a problem with its end (empty if there is none)."""
    from lockstep.data.datasets import builtin

    environment, stderr = dict(os.environ), io.StringIO()
    sys.argv = ["train.py", *words]
    code: Any = 0
    problem = ""
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(str(TRAIN), run_name="__main__")
        except SystemExit as left:
            code = left.code or 0
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    builtin._random.cache_clear()
    if "Traceback" in stderr.getvalue() or code not in (0, 2):
        problem = stderr.getvalue().strip() or f"exit code {code}"
    elif code == 2 and left_behind(folder):
        problem = f"refused, and left {left_behind(folder)}: {stderr.getvalue()}"
    elif code == 2 and max(map(len, stderr.getvalue().splitlines())) > 1000:
        problem = f"a long sentence: {stderr.getvalue()}"
    for name in left_behind(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return code, problem


def child(folder: Path, overrides: int, seed: int) -> None:
    """Try command lines until so many overrides were; write a line of `RESULTS` before and after each one."""
    import torch
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    torch.set_num_threads(1)
    where = folder / "here"
    where.mkdir()
    os.chdir(where)
    places(where)
    tried = 0
    with (folder / RESULTS).open("a", buffering=1) as results, short_of_training():

        @seeded(seed)
        @settings(
            max_examples=overrides,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(command_lines())
        def case(words: list[str]) -> None:
            nonlocal tried
            if tried >= overrides:
                return
            results.write(json.dumps({"words": words}) + "\n")
            code, problem = attempt(words, where)
            results.write(json.dumps({"code": code, "problem": problem}) + "\n")
            tried += len(words)

        case()


def watched(folder: Path, overrides: int, seed: int) -> str:
    """Run `child` in a new process and wait for it; returns what ended it, or an empty text if it finished."""
    process = ForkProcess(target=child, args=(folder, overrides, seed))
    process.start()
    size, since = -1, time.monotonic()
    while (code := process.exitcode) is None:
        process.join(0.05)
        grown = (folder / RESULTS).stat().st_size
        size, since = grown, since if grown == size else time.monotonic()
        if time.monotonic() - since > (limit := HANGS_S if grown else STARTS_S):
            process.kill()
            return f"no end within {limit:g} s"
    return "" if code == 0 else f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overrides", type=int, default=10_000, help="how many are tried, a few at a time [10000]")
    parser.add_argument("--seed", type=int, default=0, help="of the random cases [0]")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-fuzz-") as folder:
        (Path(folder) / RESULTS).touch()
        crash = watched(Path(folder), arguments.overrides, arguments.seed)
        lines = [json.loads(line) for line in (Path(folder) / RESULTS).read_text().splitlines()]
    words, ends = [line["words"] for line in lines[::2]], lines[1::2]
    problems = [(case, end["problem"]) for case, end in zip(words, ends, strict=False) if end["problem"]]
    problems += [(words[-1] if words else [], crash)] if crash else []
    codes = Counter(end["code"] for end in ends)
    print(
        f"{sum(map(len, words)):,} overrides in {len(words):,} command lines, {time.monotonic() - began:.0f} s: "
        f"{codes[0]:,} would start, {codes[2]:,} are refused, {len(problems):,} end otherwise"
    )
    for case, problem in problems:
        print(f"\n{shlex.join(case)[:1000]}\n    {problem[-1500:]}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
