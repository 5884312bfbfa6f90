"""No line of shell that SLURM gets comes from somebody else's file. `sbatch` is a stand-in that runs its script."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers import Done, composed, train
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.job.slurm import Submission, preview
from lockstep.launcher import Slurm

SBATCH = """#!/bin/sh
cat > "$SEEN"
bash "$SEEN" >&2
echo '17;cluster'
"""
DIRECTIVES = ("name", "launcher.partition", "launcher.account", "launcher.qos", "launcher.constraint")


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The variables with which a command finds the stand-ins for SLURM's programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {"PATH": f"{programs}:{os.environ['PATH']}", "SEEN": str(tmp_path / "script"), "PYTHONSAFEPATH": "1"}


def submitted(tmp_path: Path, cluster: dict[str, str], *words: str) -> Done:
    return train(*words, f"output_root={tmp_path / 'runs'}", cwd=tmp_path, **cluster)


def nested(key: str, value: object) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def sent(folder: Path, content: dict[str, Any], form: str) -> list[str]:
    """The words of a command that composes somebody else's file, in one of the ways to do so."""
    (folder / "experiment").mkdir()
    if form == "primary":
        (folder / "sent.yaml").write_text(yaml.safe_dump({"defaults": ["config", "_self_"], **content}))
        return ["--config-dir", str(folder), "--config-name", "sent"]
    (folder / "experiment" / "sent.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content))
    return ["--config-dir", str(folder), "experiment=sent"]


def assert_refused(done: Done, tmp_path: Path, mark: Path) -> None:
    """Nothing ran, no script was written, and no folder stayed."""
    assert done.code == 2, done.err
    assert len(done.err.splitlines()) == 1, done.err
    assert not mark.exists()
    assert not (tmp_path / "script").exists()
    assert not list((tmp_path / "runs").glob("2*"))


def test_shell_of_the_present_command_runs_and_everything_else_is_quoted(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    mark = tmp_path / "mark"
    texts = [f'{key}="$(touch {mark}) \'; #"' for key in DIRECTIVES]
    done = submitted(tmp_path, cluster, "launcher=slurm", f"launcher.setup=[touch {tmp_path}/typed, 'true']", *texts)
    assert done.code == 0, done.err
    assert "submitted job 17 of SLURM" in done.out
    assert (tmp_path / "typed").exists()
    assert not mark.exists()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [Path(done.out.split()[-1]).name]


@pytest.mark.parametrize("form", ["experiment", "sweep"])
def test_shell_of_a_file_does_not_run(tmp_path: Path, cluster: dict[str, str], form: str) -> None:
    mark = tmp_path / "mark"
    content: dict[str, Any] = nested("launcher.setup", [f"touch {mark}"])
    if form == "sweep":
        content = nested("hydra.sweeper.params", {"launcher.setup": f"[touch {mark}]"})
    words = [*sent(tmp_path, content, "primary" if form == "sweep" else form), "launcher=slurm"]
    done = submitted(tmp_path, cluster, *words, *["-m"] * (form == "sweep"))
    assert_refused(done, tmp_path, mark)
    assert "lines of shell come from the command line alone" in done.err


def test_a_reference_to_a_text_of_a_file_is_not_shell_of_the_command(tmp_path: Path, cluster: dict[str, str]) -> None:
    mark = tmp_path / "mark"
    words = sent(tmp_path, {"name": f"touch {mark}"}, "primary")
    done = submitted(tmp_path, cluster, *words, "launcher=slurm", "launcher.setup=['${name}']")
    assert_refused(done, tmp_path, mark)


@pytest.mark.parametrize("key", ["launcher.setup", DIRECTIVES[0]])
def test_nothing_that_a_run_folder_keeps_runs(tmp_path: Path, cluster: dict[str, str], key: str) -> None:
    mark = tmp_path / "mark"
    run = RunDir.at(tmp_path / "run")
    value = f"[touch {mark}]" if key == "launcher.setup" else f'"x\ntouch {mark}"'
    words = ["launcher=slurm", f"{key}={value}"]
    run.overrides.write_text(yaml.safe_dump(words))
    for file in (run.composed, run.config):
        file.write_text(yaml.safe_dump(composed(*words)))
    done = submitted(tmp_path, cluster, f"resume={run.path}")
    assert not mark.exists()
    assert_refused(done, tmp_path, mark)
    if key == "launcher.setup":
        done = submitted(tmp_path, cluster, f"resume={run.path}", "launcher=slurm", "launcher.setup=[]")
        assert (done.code, mark.exists()) == (0, False), done.err


@pytest.mark.parametrize(
    ("field", "character"),
    [
        *((field, "\n") for field in ("name", "root", "word", "partition", "account", "qos", "constraint", "setup")),
        *(("word", character) for character in ("\r", "\0", "\x1b", "\x85", "\u2028", "\u202e")),
    ],
)
def test_the_script_is_written_by_a_function_that_takes_no_line_end(field: str, character: str) -> None:
    text = f"x{character}touch mark"
    launcher = Slurm(**{field: [text] if field == "setup" else text} if hasattr(Slurm(), field) else {})
    job = Submission(
        launcher=launcher,
        name=text if field == "name" else "job",
        command=("train", text if field == "word" else "seed=1"),
        folder=None,
        root=Path(text if field == "root" else "runs"),
    )
    for jobs in ([job], [job, job]):
        with pytest.raises(InputError, match="has a control character; remove it"):
            preview(jobs)


def test_each_job_of_an_array_gets_its_own_command(tmp_path: Path, cluster: dict[str, str]) -> None:
    folders = [tmp_path / "it's 1", tmp_path / "100% $2"]
    jobs = [
        Submission(launcher=Slurm(), name="job", command=("train", f"seed={n}"), folder=folder, root=tmp_path)
        for n, folder in enumerate(folders)
    ]
    (tmp_path / "bin" / "srun").write_text('#!/bin/sh\nshift 4\nfor word; do echo "$word"; done\n')
    for number, folder in enumerate(folders):
        environment = {**os.environ, **cluster, "SLURM_ARRAY_TASK_ID": str(number)}
        script = subprocess.run(["bash"], input=preview(jobs), env=environment, capture_output=True, text=True)
        assert script.stdout.splitlines()[:3] == [str(folder), "train", f"seed={number}"]
    assert f"#SBATCH --output={tmp_path}/slurm-%A_%a.log" in preview(jobs).splitlines()
    assert "100%% $2/logs/slurm-%j.log'" in preview(jobs[1:])
