"""Damages run folders at random and resumes them: each is the same run to the last bit, or refused and unchanged.

    python benchmarks/reliability/mutate_run_folder.py --mutations 2000 --json mutations.json

A small real job is stopped halfway, with two checkpoints. Then its folder is copied, one thing in the copy is
changed (flipped bits, a cut, zeros, foreign content, a file of holes, two files swapped, a file or folder removed,
renamed, or made a link, a pipe, a socket, a device or a folder; files of a checkpoint replaced by those of another
step, of the same job started again, or of the job with another seed), and the user's command resumes it. Allowed are:

- exit code 0, resumed from a checkpoint, with a last checkpoint equal to the bit to that of the unchanged folder;
- exit code 2 or 74, with one line on standard error and every file (but `.lock`) as before the command.

Each command is forked from a process that has imported torch already. Linux. Exits with 1 after any other result.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")  # before torch is imported

from lockstep.config import composition
from lockstep.config.composition import Invocation
from lockstep.core.errors import Stopped
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import Lock
from lockstep.core.world import World
from lockstep.job.prepare import create_run
from lockstep.job.resume import decide_resume
from lockstep.job.worker import start_job
from lockstep.runtime import program
from lockstep.runtime.signals import StopRequest
from lockstep.training import experiment
from lockstep.training.resolved_job import load_job
from soak import fingerprint  # which finds `measure`, too

from measure import Rows, console, parser, show, write  # isort: skip

JOB = (
    *("name=mutated", "device=cpu", "model=linear", "batch=300", "steps=8", "optimizer=sgd", "train.ema=0.9"),
    *("train.eval_every=4", "checkpoint.every=2", "telemetry.interval=1", "telemetry.samples=true"),
    "launcher.threads=1",
)
STOP_AT = 5
TIME_LIMIT_S = 60.0
PRELOADED = ("torch._dynamo", "torch.utils.tensorboard", "sklearn.datasets")

FOREIGN = (
    *(b"", b"[1]", b"null", b"{}", b"\0\0\0\0", b"\xff\xfe\x00", b"not ours\n", "ü€".encode("utf-16")),
    *(b'{"step": "3"}\n', b'{"step": 1e999}\n' * 3, b"[" * 100_000, b'{"a":' * 50_000, b"9" * 10_000),
    *(b"- steps=8\n", b"- !!python/object/apply:os.system [exit]\n"),
    b"a: &a [x, x]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\n",
)


# Its kind, the file or folder that it changes, and how.
Mutation = tuple[str, Path, Callable[[Path], object]]


@dataclass
class Tally:
    """Counts of the results of one kind of mutation."""

    same: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Ended:
    """A finished command; `code` is None for one that did not end in time."""

    code: int | None
    out: str
    err: str


def forked(work: Callable[[], object], folder: Path) -> Ended:
    """Run `work` in a fork of this process, with the output and the exit code of a program."""
    out, err = folder.with_suffix(".out"), folder.with_suffix(".err")
    if (child := os.fork()) == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            for path, number in ((out, 1), (err, 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            work()
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    until = time.monotonic() + TIME_LIMIT_S
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.002)
    ended = os.waitstatus_to_exitcode(done[1]) if done[0] else None
    if ended is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return Ended(ended, out.read_text(errors="replace"), err.read_text(errors="replace"))


class _StopAt(StopRequest):
    """A stop request after a step, as a signal makes one."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step

    def requested_after_step(self) -> bool:
        self.left -= 1
        return self.left == 0


def stopped_halfway(folder: Path, seed: int) -> None:
    """Run the job in `folder` and stop it after step `STOP_AT`."""
    overrides = (*JOB, f"seed={seed}", f"output_root={folder.parent}")
    called = Invocation(overrides=overrides, sweep=False, folder=folder, hydra="{}\n")
    folder.mkdir()
    with closing(Lock()) as lock:
        job = composition.composed(list(overrides))
        with suppress(Stopped), create_run(decide_resume(job, called), lock)[0] as run_dir:
            experiment.run(load_job(run_dir.config), run_dir, World.solo(), stop=_StopAt(STOP_AT))
    run_dir.gpu.write_text('{"time": 1.0, "step": 1, "local_rank": 0, "uuid": "GPU-1", "util": 50.0}\n')


def resumed(folder: Path, composed: dict[str, Any]) -> Ended:
    """Run `python train.py resume=FOLDER`, with the config that Hydra has already `composed` for this command."""
    overrides = (f"resume={folder}", f"output_root={folder.parent}")
    called = Invocation(overrides=overrides, sweep=False, folder=None, hydra="{}\n")
    job = {**composed, "resume": str(folder), "output_root": str(folder.parent)}

    def command() -> None:
        with (
            program.command_line(),
            program.bypass_hydra_errors(),
            composition.composing(),
            closing(Lock()) as lock,
            create_run(decide_resume(job, called), lock)[0] as run_dir,
        ):
            start_job(run_dir, load_job(run_dir.config))

    return forked(command, folder)


def tree(folder: Path) -> dict[str, tuple[int, str]]:
    """Everything in a folder, by path: its kind, and the size and a hash of a file, or the target of a link."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        status, content = path.lstat(), ""
        if stat.S_ISLNK(status.st_mode):
            content = str(path.readlink())
        elif stat.S_ISREG(status.st_mode):
            # Only the beginning: a sparse file may be huge.
            with path.open("rb") as file:
                content = f"{status.st_size} {hashlib.sha256(file.read(2**24)).hexdigest()}"
        entries[str(path.relative_to(folder))] = (stat.S_IFMT(status.st_mode), content)
    entries.pop(".lock", None)
    return entries


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, dice: random.Random, count: int) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(count if data else 0):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def splice(path: Path, dice: random.Random, insert: bytes | None) -> None:
    """Remove a piece of a file, or replace it by `insert`."""
    data = path.read_bytes()
    start = dice.randrange(len(data) + 1)
    end = start + dice.randrange(1, 64)
    path.write_bytes(data[:start] + (data[end:] if insert is None else insert + data[end:]))


def lines(path: Path, dice: random.Random, times: int) -> None:
    """Remove one line of a file (`times` = 0), or repeat it."""
    content = path.read_bytes().splitlines(keepends=True)
    if content:
        at = dice.randrange(len(content))
        content[at : at + 1] = content[at : at + 1] * times
    path.write_bytes(b"".join(content))


def instead(path: Path, make: Callable[[Path], object]) -> None:
    """Replace a file or a folder by what `make` creates."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


def each_of(paths: list[Path], change: Callable[[Path], object]) -> None:
    for path in paths:
        change(path)


def bound(path: Path) -> None:
    place = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(place)


def device(path: Path) -> None:
    """Create a device like /dev/zero, if this process may do so."""
    with suppress(PermissionError):
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))


def holes(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(2**40)


def swapped(first: Path, second: Path) -> None:
    aside = first.with_name(".aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def replace_files(step: Path, donor: Path, dice: random.Random) -> None:
    """Replace one or more files of a checkpoint by those of another one."""
    names = sorted(path.name for path in donor.iterdir())
    for name in dice.sample(names, dice.randrange(1, len(names) + 1)):
        shutil.copyfile(donor / name, step / name)


def of_another_run(folder: Path, donors: dict[str, Path], dice: random.Random) -> Iterator[Mutation]:
    """Every kind of mutation with files of other runs and steps, each for a random checkpoint."""

    def replaced(path: Path, donor: Path) -> None:
        name = path.name if donor != folder else next(step.name for step in steps if step != path)
        replace_files(path, donor / "checkpoints" / name, dice)

    def all_replaced(_: Path, donor: Path) -> None:
        each_of(steps, partial(replaced, donor=donor))

    def from_donor(path: Path, donor: Path) -> None:
        shutil.copyfile(donor / path.relative_to(folder), path)

    steps = sorted(folder.glob("checkpoints/step-*"))
    for name, donor in {"another step": folder, **donors}.items():
        yield f"files of {name}", dice.choice(steps), partial(replaced, donor=donor)
    for name, donor in donors.items():
        yield f"all checkpoints of {name}", folder, partial(all_replaced, donor=donor)
        shared = [path for path in files(folder) if (donor / path.relative_to(folder)).is_file()]
        yield f"any file of {name}", dice.choice(shared), partial(from_donor, donor=donor)


def of_a_file(folder: Path, dice: random.Random) -> Iterator[Mutation]:
    """Every kind of mutation within a run, each for a random file."""
    steps = sorted(folder.glob("checkpoints/step-*"))

    def any_file() -> Path:
        return dice.choice(files(folder))

    def twin(path: Path) -> None:
        """Swap the file with the same file of another checkpoint, or with any other file."""
        candidates = [step / path.name for step in steps if step != path.parent and (step / path.name).exists()]
        other_files = [file for file in files(folder) if file != path]
        swapped(path, dice.choice(candidates if path.parent in steps else other_files))

    yield "bit flipped", any_file(), lambda path: flip(path, dice, 1)
    yield "bits flipped", any_file(), lambda path: flip(path, dice, dice.randrange(2, 100))
    yield "cut short", any_file(), lambda path: os.truncate(path, dice.randrange(path.stat().st_size + 1))
    yield "emptied", any_file(), lambda path: path.write_bytes(b"")
    yield "zeroed", any_file(), lambda path: path.write_bytes(bytes(path.stat().st_size))
    yield "piece taken out", any_file(), lambda path: splice(path, dice, None)
    yield "piece overwritten", any_file(), lambda path: splice(path, dice, dice.randbytes(dice.randrange(1, 64)))
    yield "line dropped", any_file(), lambda path: lines(path, dice, 0)
    yield "line repeated", any_file(), lambda path: lines(path, dice, 2)
    yield "added to", any_file(), lambda path: path.write_bytes(path.read_bytes() + dice.randbytes(30))
    yield "foreign content", any_file(), lambda path: path.write_bytes(dice.choice(FOREIGN))
    yield "of another file", any_file(), lambda path: path.write_bytes(any_file().read_bytes())
    yield "two swapped", any_file(), twin
    yield "removed", any_file(), lambda path: path.unlink()
    yield "made a folder", any_file(), lambda path: instead(path, Path.mkdir)
    yield "made a pipe", any_file(), lambda path: instead(path, os.mkfifo)
    yield "made a socket", any_file(), lambda path: instead(path, bound)
    yield "made a device", any_file(), lambda path: instead(path, device)
    yield "made a link", any_file(), lambda path: instead(path, lambda place: place.symlink_to(place.name))
    yield "made a link", any_file(), lambda path: instead(path, lambda place: place.symlink_to("/dev/zero"))
    yield "made a link", any_file(), lambda path: instead(path, lambda place: place.symlink_to("nowhere"))
    yield "made of holes", any_file(), holes
    folders = sorted(path for path in folder.rglob("*") if path.is_dir())
    yield "folder removed", dice.choice(folders), shutil.rmtree
    yield "folder emptied", dice.choice(folders), lambda path: instead(path, Path.mkdir)
    yield "folder made a file", dice.choice(folders), lambda path: instead(path, Path.touch)
    yield "folder renamed", dice.choice(steps), lambda path: path.rename(path.with_name("step-00000007"))
    yield "all checkpoints", folder, lambda path: each_of(steps, lambda step: flip(dice.choice(files(step)), dice, 1))
    yield "all checkpoints", folder, lambda path: each_of(steps, shutil.rmtree)
    yield "folders swapped", steps[0], lambda path: swapped(path, steps[-1])


def every_mutation(folder: Path, donors: dict[str, Path], dice: random.Random) -> list[Mutation]:
    return [*of_another_run(folder, donors, dice), *of_a_file(folder, dice)]


def judge(ended: Ended, before: dict[str, tuple[int, str]], folder: Path, expected: str) -> str:
    """A sentence about what is wrong with the end of a command; empty if nothing is."""
    shown = f"exit code {ended.code}: {(ended.err or ended.out)[-600:]}"
    if ended.code is None:
        return "it did not end"
    if "Traceback" in ended.out + ended.err:
        return f"a traceback, {shown}"
    if ended.code == 0:
        if not any(line.split()[:1] == ["from"] for line in ended.out.splitlines()):
            return f"a silent fresh start, {shown}"
        return "" if fingerprint(RunDir(folder)) == expected else f"other bits, {shown}"
    if ended.code not in (2, 74):
        return shown
    after = tree(folder)
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    if changed:
        return f"it changed {', '.join(sorted(changed))}, {shown}"
    return "" if len(ended.err.splitlines()) == 1 else f"not one sentence, {shown}"


def mutate(root: Path, mutations: int, seed: int) -> dict[str, Tally]:
    """Resume `mutations` damaged copies of one run; returns the results by the kind of mutation."""
    dice = random.Random(seed)
    original, undamaged = root / "original", root / "undamaged"
    donors = {"the same seed": root / "again", "another seed": root / "other"}
    for folder, of in ((original, 0), (donors["the same seed"], 0), (donors["another seed"], 1)):
        if (job := forked(partial(stopped_halfway, folder, of), folder)).code:
            raise SystemExit(f"a job to mutate could not be made: {job.err}")
    shutil.copytree(original, undamaged)
    composed = composition.composed(["name=resume"])
    if (done := resumed(undamaged, composed)).code:
        raise SystemExit(f"the run that nobody changed ended with {done.code}: {done.err}")
    expected = fingerprint(RunDir(undamaged))
    tallies: dict[str, Tally] = {}
    number = 0
    while number < mutations:
        kinds = len(list(every_mutation(original, donors, random.Random(0))))
        for kind in range(min(kinds, mutations - number)):
            number += 1
            folder = root / f"{number:05}"
            shutil.copytree(original, folder)
            name, path, change = list(every_mutation(folder, donors, dice))[kind]
            change(path)
            before = tree(folder)
            ended = resumed(folder, composed)
            tally = tallies.setdefault(name, Tally())
            if fault := judge(ended, before, folder, expected):
                tally.faults.append(f"{number}: {name}, {path.relative_to(folder)}: {fault}")
                console.print(tally.faults[-1], soft_wrap=True, markup=False)
                continue  # leave the folder for inspection
            tally.same += ended.code == 0
            tally.refused += ended.code != 0
            shutil.rmtree(folder)
            folder.with_suffix(".out").unlink()
            folder.with_suffix(".err").unlink()
    return tallies


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--mutations", type=int, default=2000)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    for name in PRELOADED:
        __import__(name)
    root = Path(tempfile.mkdtemp(prefix="lockstep-mutate-"))
    tallies = mutate(root, arguments.mutations, arguments.seed)
    rows: Rows = {
        name: {"same bits": tally.same, "refused, untouched": tally.refused, "faults": len(tally.faults)}
        for name, tally in tallies.items()
    }
    columns = ("same bits", "refused, untouched", "faults")
    rows["all"] = {column: sum(row[column] for row in rows.values()) for column in columns}
    show("resumed after one change", rows, ratios=False)
    write(arguments.json, {"mutations": rows}, seed=arguments.seed)
    if rows["all"]["faults"]:
        console.print(f"the folders are kept in {root}", soft_wrap=True)
        sys.exit(1)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
