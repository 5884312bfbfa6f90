"""`lockstep evaluate RUN launcher.ranks=N`: the files of one rank to the bit, and how a rank ends the command."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import forks
from helpers import NARROW, Done, forked, train_here, tree
from lockstep.core.run_dir import RunDir
from lockstep.data.loading.shards import EvalLoader
from processes import Process, background, ended, processes, ranks, send, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
BROKEN = (5, 13)  # the images of the table that cannot be decoded; of two ranks read one each
TABLE = ("dataset=csv", "dataset.decode_size=6", "batch=8", "epochs=1", "augment=none", "model=linear")
SHARE = ("dataset.val_share=0.5", "train.eval_batch=5", "dataset.skip=3", "launcher.threads=1")
JOBS = {
    "multiclass": (*TABLE, *SHARE, "dataset.label_column=one", "metric=f1"),
    "multilabel": (*TABLE, *SHARE, "dataset.label_columns=[x,y]", "task=multilabel"),
    "regression": (*TABLE, *SHARE, "dataset.label_columns=[u,v]", "task=regression"),
    "digits": (NARROW, "steps=3", "train.ema=0.9", "train.eval_views=6", "train.eval_batch=40", "metric=[f1,auroc]"),
}
SLOW = [*JOBS][1:]


def table(folder: Path) -> Path:
    """40 noisy images, two of them broken, and a table with a class, two labels and two values for each."""
    draws = np.random.default_rng(0)
    lines = ["path,one,x,y,u,v"]
    for number in range(40):
        pixels = draws.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        lines.append(
            f"{number}.png,{'ab'[number % 2]},{number % 2},{number // 2 % 2},{pixels.mean()},{draws.normal()}"
        )
    for number in BROKEN:
        (folder / f"{number}.png").write_bytes(b"no image")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return folder / "table.csv"


def trained(folder: Path, name: str) -> RunDir:
    data = () if name == "digits" else (f"dataset.path={table(folder)}",)
    return train_here(folder / "run", *JOBS[name], *data)


def evaluated(run: Path, out: Path, *words: str) -> tuple[Done, dict[str, bytes]]:
    """The command, and the files that it has written."""
    out.mkdir()
    done = forked("lockstep", "evaluate", str(run), "--out", str(out), *words)
    assert done.code == 0, done.err
    return done, tree(out)


@pytest.mark.numerics
@pytest.mark.parametrize(
    "name", ["multiclass", *(pytest.param(name, marks=pytest.mark.slow) for name in [*JOBS][1:])]
)
def test_an_evaluation_writes_the_same_bits_on_any_number_of_ranks(tmp_path: Path, name: str) -> None:
    run = trained(tmp_path, name).path
    before = tree(run)
    done, files = evaluated(run, tmp_path / "alone")
    assert files.keys() == {"evaluation.json", "predictions.csv"}
    for number in (2, 3):
        on_ranks, own = evaluated(run, tmp_path / str(number), f"launcher.ranks={number}")
        assert own == files
        assert without_paths(on_ranks.out) == without_paths(done.out), "and main alone shows them"
    assert tree(run) == before, "the run keeps its own logs"


def without_paths(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if not re.match("wrote|warning: ", line))


@pytest.mark.numerics
def test_ranks_without_an_image_take_part_and_the_training_split_and_other_data_too(tmp_path: Path) -> None:
    run = trained(tmp_path, "multiclass").path
    for number, words in enumerate((("--split", "train"), (f"dataset.path={tmp_path}/table.csv", "dataset.skip=2"))):
        _, files = evaluated(run, tmp_path / f"alone{number}", *words)
        _, own = evaluated(run, tmp_path / f"ranks{number}", *words, "launcher.ranks=7", "--json")
        assert own == files


def waiting(mark: str, *words: str) -> None:
    """Run a command whose evaluation never ends, in ranks that are forks; each rank says that it has begun."""
    blocks = EvalLoader.eval

    def eval_blocks(loader: EvalLoader) -> Iterator[Any]:
        for block in blocks(loader):
            Path(f"{mark}.{loader.world.rank}").touch()
            wait_for(lambda: False)
            yield block

    EvalLoader.eval = eval_blocks  # type: ignore[method-assign]
    forks.run(sys.path, *words)


@pytest.fixture
def evaluating(tmp_path: Path) -> Process:
    """An evaluation on two ranks, both of which have begun."""
    run, mark = trained(tmp_path, "digits").path, tmp_path / "begun"
    command = ("lockstep", "evaluate", str(run), "--out", str(tmp_path), "launcher.ranks=2")
    process = background(tmp_path, "test_evaluate_on_ranks:waiting", str(mark), *command, TMPDIR=str(tmp_path))
    wait_for(lambda: process.poll() is not None or len([*tmp_path.glob("begun.*")]) == 2)
    assert process.poll() is None, process.communicate()
    return process


def test_a_killed_rank_ends_an_evaluation_in_one_sentence_that_names_its_log(
    tmp_path: Path, evaluating: Process
) -> None:
    send(signal.SIGKILL, ranks(tmp_path, evaluating)[1])
    code, err = ended(evaluating)
    assert code == 70
    sentence = err.strip().splitlines()[-1]
    assert sentence.startswith("lockstep: rank 1 was ended by SIGKILL, probably because the machine")
    assert "; use fewer ranks; see " in sentence
    assert Path(sentence.rpartition("see ")[2]).is_file()
    assert not processes(tmp_path)
    assert not [*tmp_path.glob("evaluation*"), *tmp_path.glob("predictions*")]


def test_ctrl_c_ends_an_evaluation_on_ranks_and_leaves_nothing(tmp_path: Path, evaluating: Process) -> None:
    os.killpg(evaluating.pid, signal.SIGINT)
    code, err = ended(evaluating)
    assert (code, "Traceback" in err) == (75, False), err
    assert err.endswith("lockstep: stopped before it was done; the same command does it again\n")
    assert not processes(tmp_path)
    assert not [*tmp_path.glob("lockstep-*"), *tmp_path.glob("evaluation*")]


def test_too_many_broken_images_of_all_ranks_together_end_an_evaluation(tmp_path: Path) -> None:
    run = trained(tmp_path, "multiclass").path
    words = (f"dataset.path={tmp_path}/table.csv", "launcher.ranks=2", "--out", str(tmp_path))
    done = forked("lockstep", "evaluate", str(run), "--split", "train", *words, "dataset.skip=1")
    assert done.code == 2
    assert "dataset.skip is 1, but 2 images cannot be decoded" in done.err
    (place := tmp_path / "out").mkdir()
    done = forked("lockstep", "evaluate", str(run), "--split", "train", *words[:2], "--out", str(place))
    assert "warning: 1 more image" in done.out, "of the other rank"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("launcher=inline", "launcher.ranks=2"), "launcher=inline has one rank, but launcher.ranks requests 2"),
        (("launcher=slurm",), "launcher=slurm: this command starts its ranks on one machine alone"),
        (("launcher=elastic", "launcher.nodes=2"), "launcher=elastic: this command starts its ranks on one machine"),
        (("launcher.ranks=2", "launcher.restarts=1"), "launcher.restarts"),
    ],
)
def test_a_launcher_that_does_not_fit_an_evaluation_is_refused(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    done = forked("lockstep", "evaluate", str(tmp_path), *words)
    assert (done.code, done.out) == (2, "")
    assert sentence in done.err


def test_torchrun_is_told_how_an_evaluation_starts_ranks(tmp_path: Path) -> None:
    done = forked("lockstep", "evaluate", str(tmp_path), RANK="0", WORLD_SIZE="2")
    assert done.code == 2
    assert "start it without torchrun or srun -n, with launcher.ranks=2" in done.err
