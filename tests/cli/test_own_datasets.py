"""A Dataset of torch in a package of the user's: the same run on any ranks and loaders, and through a kill."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from helpers import ROOT, Done, forked, largest_difference, own_project, train_in, weights

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

SCANS = next(
    block
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "extending.md").read_text(), re.M | re.S)
    if block.startswith("# mine/scans.py")
)
OTHERS = '''

class Stopping(Scans):
    """Kills its process in the third epoch."""

    def __getitem__(self, index):
        import os, signal, pathlib
        counts = pathlib.Path("count")
        counts.write_text(counts.read_text() + "." if counts.exists() else ".")
        if len(counts.read_text()) == 900:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@lockstep.option("dataset")
class Killed(ScansOption):
    def train_dataset(self):
        return Stopping(range(self.patients))


@lockstep.option("dataset")
class Noisy(ScansOption):
    def train_dataset(self):
        class Noise(Scans):
            def __getitem__(self, index):
                image, target = super().__getitem__(index)
                return image * np.random.default_rng().random(), target

        return Noise(range(self.patients))


@lockstep.option("dataset")
class Failing(ScansOption):
    def train_dataset(self):
        class Fails(Scans):
            targets = [n // 4 % 2 for n in range(240)]

            def __getitem__(self, index):
                if index == 77:
                    raise RuntimeError("the archive has no scan 77")
                return super().__getitem__(index)

        return Fails(range(self.patients))


@lockstep.option("dataset")
class Drawing(ScansOption):
    def train_dataset(self):
        class Draws(Scans):
            def __getitem__(self, index):
                import torch
                torch.rand(3)
                return super().__getitem__(index)

        return Draws(range(self.patients))


class Sums(Scans):
    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image, self.form(image, target)


class SumsOption(DatasetOption):
    def train_dataset(self, first=0):
        sums = Sums(range(first, first + 10))
        sums.form = self.form
        return sums

    def val_dataset(self):
        return self.train_dataset(first=10)


@lockstep.option("dataset")
class Graded(SumsOption):
    def form(self, image, target):
        return float(image.mean())


@lockstep.option("dataset")
class Marked(SumsOption):
    def form(self, image, target):
        return np.array([target, 1 - target])
'''
JOB = ("model=basicnet", "batch=40", "epochs=4", "precision=fp64", "device=cpu", "optimizer=sgd", "optimizer.lr=0.05")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_project(tmp_path_factory.mktemp("project"), SCANS + OTHERS)


def train(project: Path, name: str, *words: str, code: int = 0) -> Done:
    return train_in(project, name, *JOB, *words, code=code)


def test_a_dataset_of_torch_is_the_same_run_on_any_ranks_and_loaders(project: Path) -> None:
    train(project, "one", "dataset=scans")
    for number, words in enumerate(
        (
            ("strategy=ddp", "launcher.ranks=2"),
            ("loader=streaming", "loader.workers=2"),
            ("loader=streaming", "loader.workers=0", "strategy=ddp", "launcher.ranks=3"),
        )
    ):
        train(project, f"other-{number}", "dataset=scans", *words)
        assert largest_difference(weights(project / "one"), weights(project / f"other-{number}")) < 1e-12, words


def test_a_run_on_a_dataset_that_was_killed_goes_on_to_the_same_weights(project: Path) -> None:
    words = ("dataset=killed", "loader=streaming", "loader.workers=0")
    assert forked("train.py", *JOB, "hydra.run.dir=killed", *words, cwd=project).code != 0
    done = forked("train.py", "resume=killed", cwd=project)
    assert done.code == 0, done.err
    train(project, "whole", "dataset=scans", "loader=streaming", "loader.workers=0")
    assert all(torch.equal(a, weights(project / "whole")[name]) for name, a in weights(project / "killed").items())


def test_folds_keep_the_patients_of_a_dataset_together_and_other_items_are_refused_at_a_resume(project: Path) -> None:
    train(project, "fold", "dataset=scans", "dataset.folds=3", "dataset.fold=1")
    scored = json.loads((project / "fold" / "summary.json").read_text())
    assert scored["status"] == "completed"
    done = forked("train.py", "resume=fold", "epochs=5", "dataset.patients=64", cwd=project)
    assert done.code == 2
    assert "examples: here 168, there 160" in done.err


def test_a_random_dataset_is_named_and_streamed(project: Path) -> None:
    done = train(project, "noisy", "dataset=noisy")
    assert "the training split draws random numbers of its own" in done.out + done.err
    assert "each epoch reads other pixels" in done.out + done.err


def test_an_item_that_raises_ends_the_run_with_its_line_and_can_be_skipped(project: Path) -> None:
    done = train(project, "failing", "dataset=failing", code=2)
    sentence = r"item 77 of the training split: RuntimeError: the archive has no scan 77 \(__init__.py, line"
    assert re.search(sentence, done.err)
    assert "Traceback" not in done.err
    train(project, "skipping", "dataset=failing", "dataset.skip=1")


def test_items_that_draw_from_torchs_generator_leave_the_initial_weights_as_they_are(project: Path) -> None:
    for name in ("scans", "drawing"):
        train(project, f"from-{name}", f"dataset={name}", "epochs=1")
    assert largest_difference(weights(project / "from-scans"), weights(project / "from-drawing")) == 0


@pytest.mark.parametrize(("dataset", "task"), [("graded", "regression"), ("marked", "multilabel")])
def test_a_dataset_has_the_targets_of_the_task(project: Path, dataset: str, task: str) -> None:
    train(project, f"as-{task}", f"dataset={dataset}", f"task={task}", "epochs=1")
