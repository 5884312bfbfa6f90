"""A run folder has one job at a time; and what someone else wrote (a config, a folder, a checkpoint) runs no code.

Where the command adds nothing, its route from overrides to the run folder is taken in this process.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from helpers import records, refusal, train, train_here, tree
from lockstep.config import schema
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.training import experiment
from lockstep.training.resolved_job import load_job
from processes import Process, background, close, wait_for

SECRET = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Process]]:
    """A job that would train for hours, with a loader thread."""
    path = tmp_path_factory.mktemp("runs") / "held"
    words = ("epochs=100000", "loader=streaming", "loader.workers=1", "telemetry.interval=1", "device=cpu")
    where = (f"hydra.run.dir={path}", f"output_root={path.parent}")
    job = background(path, sys.executable, "train.py", *words, *where, LOCKSTEP_TEST_SECRET=SECRET)
    wait_for((path / "checkpoints" / "last").exists)
    yield path, job
    close([job])


def test_a_second_job_in_a_folder_is_refused_while_the_first_stands_still_and_not_when_it_is_gone(
    running: tuple[Path, Process],
) -> None:
    path, first = running
    first.send_signal(signal.SIGSTOP)  # so that whatever changes is of the others
    wait_for(lambda: Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    before, names = tree(path.parent), {file.name for file in path.parent.iterdir()}
    for words in ([f"hydra.run.dir={path}"], [f"resume={path}"], ["resume=latest"]):
        done = train(*words, "device=cpu", f"output_root={path.parent}")
        assert done.code == 2
        assert done.err.startswith(f"lockstep: {path} is in use by another job (process {first.pid} on ")
        assert len(done.err.splitlines()) == 1
    assert (tree(path.parent), {file.name for file in path.parent.iterdir()}) == (before, names)
    # The folder of a job that was killed is free at once.
    first.kill()
    first.wait()
    assert (path / ".lock").exists()
    step = records(path)[-1]["step"] + 1
    done = train(f"resume={path}", "epochs=100000", f"steps={step}", "device=cpu", "telemetry.interval=1")
    assert done.code == 0, done.err
    assert [line["step"] for line in records(path) if "loss/train" in line] == list(range(1, step + 1))
    assert not (path / ".lock").exists()


def test_a_secret_of_the_environment_is_in_no_file_of_a_run(running: tuple[Path, Process]) -> None:
    assert not [name for name, content in tree(running[0]).items() if SECRET.encode() in content]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that is done."""
    return train_here(tmp_path_factory.mktemp("runs") / "done", "steps=3", "name=test").path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run, as someone else could send it."""
    return Path(shutil.copytree(finished, tmp_path / "sent"))


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_SECRET", SECRET)


REFERENCES = ["name='${oc.env:LOCKSTEP_TEST_SECRET}'", "data_root='${oc.env:LOCKSTEP_TEST_SECRET,x}'"]


@pytest.mark.parametrize("override", REFERENCES)
def test_a_config_cannot_read_the_environment(tmp_path: Path, run: Path, override: str) -> None:
    key = override.partition("=")[0]
    expected = f"{key} asks for ${{oc.env:...}}, which is not allowed; write {key}=VALUE"
    assert refusal(tmp_path / "runs", override) == expected
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(["steps=3", "name=test", override]))
    assert refusal(tmp_path / "runs", f"resume={run}", "steps=6") == expected


def test_a_reference_that_was_escaped_does_not_come_to_life_in_a_rank(tmp_path: Path) -> None:
    message = refusal(tmp_path / "runs", r"name='\${oc.env:LOCKSTEP_TEST_SECRET}'")
    assert message.startswith("name has ${ in its value")


def test_a_kept_config_with_a_reference_is_refused(run: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "name": "${oc.env:LOCKSTEP_TEST_SECRET}"}))
    assert "is not a config of a run" in refusal(tmp_path / "runs", f"resume={run}", "steps=6")


TARGETS = [
    ("model", "os.system"),
    ("model", "lockstep.models.zoo.timm.create_model"),
    ("strategy", "lockstep.models.DigitNet"),
]


@pytest.mark.parametrize(("group", "target"), TARGETS)
def test_a_target_from_elsewhere_is_refused_wherever_it_stands(
    run: Path, tmp_path: Path, group: str, target: str
) -> None:
    expected = f"{group}._target_ is {target!r}, expected a class of {schema.GROUPS[group]}"
    hostile = [f"{group}._target_={target}", f"+{group}.command='touch {tmp_path}/executed'"]
    assert expected in refusal(tmp_path / "runs", *hostile)
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(["steps=3", "name=test", *hostile]))
    (run / ".hydra" / "config.yaml").unlink()  # it would not be that of these overrides
    assert expected in refusal(tmp_path / "runs", f"resume={run}", "steps=6")
    config = yaml.safe_load((run / "config.yaml").read_text())
    node = {"_target_": target, "command": f"touch {tmp_path}/executed"}
    (run / "config.yaml").write_text(yaml.safe_dump({**config, group: node}))
    with pytest.raises(InputError, match=f"{group}._target_ is"):
        experiment.run(load_job(RunDir(run).config), RunDir(run), World.solo())
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", ["!!python/object/apply:os.mkdir ['executed']", "3", "["])
@pytest.mark.parametrize("name", [".hydra/overrides.yaml", "config.yaml"])
def test_a_kept_file_that_is_something_else_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (run / name).write_text(content)
    before = tree(run)
    assert str(run / name) in refusal(tmp_path / "runs", f"resume={run}", "steps=6")
    assert tree(run) == before
    assert not Path("executed").exists()


@pytest.mark.parametrize("place", ["train.log", "logs", "checkpoints/last", ".lock"])
def test_a_link_in_a_run_folder_is_refused_and_what_it_leads_to_stays(run: Path, tmp_path: Path, place: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    if (run / place).is_dir():
        shutil.rmtree(run / place)
    (run / place).unlink(missing_ok=True)
    (run / place).symlink_to(precious)
    message = refusal(tmp_path / "runs", f"resume={run}", "steps=6")
    assert str(run / place) in message
    assert precious.read_text() == "precious"
