"""Training works without the packages that read runs: a copy of the source without them trains, stops and resumes."""

import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from test_architecture import PACKAGE, PLUGINS, RIM

from helpers import first_on_path
from lockstep.core.run import Run
from processes import Process, background, ended, steps_done, wait_for

OURS = str(PACKAGE.parent)  # where this interpreter has the whole package
CODE = f"import sys; sys.path.remove({OURS!r}); import lockstep; lockstep.train(sys.argv[1:])"


@pytest.fixture
def heart(tmp_path: Path) -> Path:
    """A copy of the source without the packages of the rim, the command, and Hydra's plugins for sweeps."""
    copy = tmp_path / "heart"
    shutil.copytree(PACKAGE, copy / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*RIM, "cli"):
        shutil.rmtree(copy / "lockstep" / name)
    plugins = copy / PLUGINS.name / "lockstep"
    plugins.mkdir(parents=True)
    shutil.copy(PLUGINS / "lockstep" / "named_options.py", plugins)
    config = copy / "lockstep" / "conf" / "config.yaml"
    config.write_text(re.sub(r".*override hydra/(launcher|sweeper).*\n", "", config.read_text()))
    return copy


@pytest.mark.slow
def test_a_lone_heart_trains_stops_and_resumes_the_default_job(heart: Path) -> None:
    def start(*words: str) -> Process:
        words = (sys.executable, "-c", CODE, "launcher.threads=1", *words)
        return background(run.folder, *words, cwd=heart, afresh=True, PYTHONPATH=first_on_path(heart))

    run = Run(heart / "outputs" / "run")
    first = start(f"hydra.run.dir={run.folder}", "epochs=10")
    wait_for(lambda: first.poll() is not None or steps_done(run.folder) >= 2)
    first.send_signal(signal.SIGTERM)
    assert "Stopped: stopped at step" in ended(first)[1]
    code, err = ended(start("resume=latest"))
    assert code == 0, err
    summary = Run(run.folder).summary
    assert summary["status"] == "completed"
    assert summary["step"] == summary["steps"]
    assert "verdict" not in summary
