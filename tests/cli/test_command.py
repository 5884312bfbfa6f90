"""What the command itself adds to a refusal: the exit code, the streams, and that nothing is left behind."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from torchvision.io import write_jpeg

from helpers import Done, as_ranks, command, train, tree
from lockstep.config.commands import override

PICTURES = ("dataset=folder", "dataset.decode_size=8", "batch=4", "steps=3", "name=pictures", "device=cpu")


def sentence(done: Done) -> str:
    """The one line of a refused command."""
    assert done.code == 2, done
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    assert lines[0].startswith("lockstep: ")
    return lines[0].removeprefix("lockstep: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("epoch=3", "Did you mean epochs=3?"),
        ("--config-name=nope", "there is no config named 'nope'"),
        ("hydra.run.dir=/dev/null/run", "/dev/null/run cannot be written (Not a directory)"),
        ("-m epochs=1,abc", "epochs is 'abc', expected auto or a whole number"),
        ("epochs=1 -m seed=1,2 output_root=/dev/null/runs", "cannot be written (Not a directory)"),
        ("seed=1,2", "seed=1,2 names several values; `python train.py -m seed=1,2` runs a sweep over them"),
        ("precision=fp16 device=cpu", "precision=fp16 needs a CUDA GPU"),
    ],
)
def test_a_mistake_ends_with_code_2_and_one_line_on_stderr(tmp_path: Path, overrides: str, expected: str) -> None:
    done = train(f"output_root={tmp_path / 'runs'}", *overrides.split())
    assert expected in sentence(done)
    assert done.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_traceback_is_shown_when_asked_for(tmp_path: Path) -> None:
    done = train("epochs=0", f"output_root={tmp_path}", HYDRA_FULL_ERROR="1")
    assert done.code == 2
    assert "Traceback (most recent call last)" in done.err
    assert done.err.endswith(
        "lockstep: epochs is 0, expected auto or a whole number from 1 to 1,000,000,000: epochs=20\n"
    )


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that not even root can write to."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    mounted = command("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder))
    if mounted.code:
        pytest.skip(f"a read-only file system cannot be mounted here: {mounted.err.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_output_root_is_said(read_only: Path) -> None:
    message = sentence(train("steps=1", f"output_root={read_only}"))
    assert "cannot be written (Read-only file system); choose a folder that can be, with output_root=" in message


def test_torchrun_with_a_sweep_is_refused_once(tmp_path: Path) -> None:
    main, silent = as_ranks("-m", "seed=1,2", f"output_root={tmp_path / 'runs'}")
    expected = "torchrun would run the whole sweep in each rank; type python train.py -m ... instead"
    assert sentence(main) == expected
    assert (silent.code, silent.err) == (2, "")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder data set of 12 images, the tenth of which is none."""
    folder = tmp_path_factory.mktemp("pictures")
    for split in ("train", "val"):
        for name in "ab":
            (folder / split / name).mkdir(parents=True)
            for number in range(6):
                image = torch.full((3, 8, 8), 40 * number, dtype=torch.uint8)
                write_jpeg(image, str(folder / split / name / f"{number}.jpg"))
    (folder / "train" / "b" / "3.jpg").write_bytes(b"no image at all")
    return folder


@pytest.mark.parametrize(("loader", "launcher"), [("streaming", "inline"), ("resident", "spawn")])
def test_a_broken_image_is_named_once(tmp_path: Path, pictures: Path, loader: str, launcher: str) -> None:
    ranks = f"launcher.ranks={1 if launcher == 'inline' else 2}"
    where = (f"dataset.path={pictures}", f"output_root={tmp_path}")
    # With loader.workers=auto a few images are read before the run, to see how fast that goes.
    workers = ("loader.workers=1",) if loader == "streaming" else ()
    done = train(*PICTURES, f"loader={loader}", *workers, f"launcher={launcher}", ranks, *where)
    message = sentence(done)
    assert message.startswith(f"dataset: image 9, {pictures}/train/b/3.jpg, cannot be decoded (")
    assert "; remove or replace the file, or skip up to N of them with dataset.skip=N; `lockstep doctor`" in message
    # A resident loader reads all images before the run begins; a streaming one meets this image in the run.
    left = [path.name for path in tmp_path.iterdir() if path.name != "latest"]
    assert len(left) == (loader == "streaming")


def test_hydra_full_error_shows_where_a_rank_met_the_broken_image(tmp_path: Path, pictures: Path) -> None:
    where = (f"dataset.path={pictures}", f"output_root={tmp_path}")
    words = (*PICTURES, "loader=resident", "launcher=spawn", "launcher.ranks=2", *where)
    done = train(*words, HYDRA_FULL_ERROR="1")
    assert done.code == 2
    assert "datasets/files.py" in done.err, "the frame that decodes, in a rank's own traceback"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output root of one finished run of three steps."""
    root = tmp_path_factory.mktemp("runs")
    assert train("steps=3", "device=cpu", f"output_root={root}").code == 0
    return root


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            "resume=latest model=resnet10t steps=6",
            "is a checkpoint of another run (model: here Timm(name=resnet10t), there DigitNet()); resume with the "
            "same values, or take only its weights with init_from=PATH",
        ),
        ("init_from=LATEST model=basicnet steps=1", " tensors differ, e.g. 1.bias (here None, there (32,))"),
    ],
)
def test_a_refused_resume_leaves_the_old_run_as_it_was(finished: Path, overrides: str, expected: str) -> None:
    before = tree(finished)
    run = finished / (finished / "latest").read_text().strip()
    words = overrides.replace("LATEST", str(run)).split()
    assert expected in sentence(train(f"output_root={finished}", "device=cpu", *words))
    assert tree(finished) == before


def test_a_run_that_was_killed_behind_its_last_checkpoint_comes_to_its_end(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished / (finished / "latest").read_text().strip(), run)
    summary = json.loads((run / "summary.json").read_text())
    left = {key: summary[key] for key in ("started", "step")} | {"status": "running"}
    (run / "summary.json").write_text(json.dumps(left))
    (run / "model.safetensors").unlink()
    before = (run / "metrics.jsonl").read_text()
    done = train(f"resume={run}", f"output_root={tmp_path}", "device=cpu")
    assert done.code == 0, done.err
    ended = json.loads((run / "summary.json").read_text())
    assert [ended[key] for key in ("status", "step", "best")] == ["completed", 3, summary["best"]]
    assert (run / "model.safetensors").is_file()
    assert (run / "metrics.jsonl").read_text() == before


def test_a_resume_that_its_ranks_refuse_does_not_spoil_the_next_one(finished: Path) -> None:
    before = tree(finished)
    only_ranks_know = ("strategy=ddp", "launcher.ranks=2", "strategy.static_graph=true", "train.micro_batches=2")
    done = train("resume=latest", "steps=6", *only_ranks_know, f"output_root={finished}", "device=cpu")
    assert done.code == 2, done
    note, message = done.err.splitlines()
    assert note.startswith("resume: a run of 6 steps would have had until step 3, in steps: another learning rate")
    assert "accumulation changes the graph within a step" in message
    after = {name: text for name, text in tree(finished).items() if not name.endswith((".log", ".error.json"))}
    assert after == {name: text for name, text in before.items() if not name.endswith(".log")}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("hydra.sweep.dir={}/sweep",), "/sweep has no effect without -m; name a folder with hydra.run.dir=FOLDER"),
        (
            ("-m", "seed=1,2", "hydra.run.dir={}/run"),
            "/run has no effect with -m; name a folder with hydra.sweep.dir=",
        ),
        (("hydra.output_subdir={}/sub",), "a run folder has its own .hydra, and Hydra writes none; remove it"),
    ],
)
def test_a_folder_that_the_job_would_not_use_is_refused(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    done = train(*(word.format(tmp_path) for word in words), f"output_root={tmp_path}")
    assert says in sentence(done)
    assert list(tmp_path.iterdir()) == []


def test_a_resume_as_the_run_proposes_it_has_the_config_files_of_the_run(tmp_path: Path) -> None:
    conf = tmp_path / "more conf" / "experiment"
    conf.mkdir(parents=True)
    (conf / "mine.yaml").write_text("# @package _global_\nsteps: 1\nbatch: 24\n")
    (conf.parent / "other.yaml").write_text("defaults:\n  - config\n  - _self_\nseed: 7\n")
    where = (f"--config-dir={conf.parent}", "--config-name=other")
    root = override("output_root", tmp_path / "runs, [a=b]")
    done = train(*where, "experiment=mine", root, "device=cpu")
    assert done.code == 0, done.err
    proposed = next(line for line in done.out.splitlines() if "train longer" in line).partition("train.py ")[2]
    again = train(*shlex.split(proposed))
    assert again.code == 0, again.err
    (run,) = (path.parent for path in (tmp_path / "runs, [a=b]").rglob("command.txt"))
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["seed"], config["batch"], config["steps"]) == (7, 24, 2)
    assert shlex.split((run / "command.txt").read_text())[2:] == shlex.split(proposed)
