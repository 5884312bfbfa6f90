"""Completion of words with TAB; `model=NAME` for every name of timm, without a file and without importing timm."""

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pytest
import timm
from hydra.core.global_hydra import GlobalHydra

from helpers import ROOT, command, composed, forked, train
from lockstep.config import components
from lockstep.config.command_line import answered
from lockstep.config.hydra_versions import initialize_config_dir
from lockstep.config.options import TIMM, model_of, models_of, tagged_names
from lockstep.models import Timm

QUERY = ("-sc", "query=bash")


@pytest.mark.parametrize(
    ("word", "completed"),
    [
        ("model=resnet50.a1_", ["model=resnet50.a1_in1k"]),
        ("model=torchvision.resnet50.IM", [f"model=torchvision.resnet50.IMAGENET1K_V{n}" for n in (1, 2)]),
        ("model=torchvision.resn", None),  # Hydra completes it
        ("model=no_such.", []),
        ("model=resnet5", None),
        ("opt", None),
    ],
)
def test_tagged_weights_are_ours_to_complete(
    word: str, completed: list[str] | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", f"python train.py {word}")
    assert answered(QUERY) == (completed is not None)
    assert capsys.readouterr().out.split() == (completed or [])


def test_a_shell_is_answered(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    paths = train(*QUERY, cwd=tmp_path, COMP_LINE="python train.py dataset.path=./pho").out.split()
    assert "dataset.path=./photos" in paths
    for line, completed in (("lockstep e", ["evaluate", "export"]), ("lockstep evaluate ", [])):
        assert forked("lockstep", *QUERY, cwd=tmp_path, COMP_LINE=line).out.split() == completed


@pytest.mark.parametrize(("shell", "gap"), [("bash", " "), ("zsh", " "), ("fish", "\n")])
def test_a_shell_gets_the_names_apart_as_it_reads_them(
    shell: str, gap: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", "lockstep train model=resnet50d.")
    assert answered(["lockstep", "-sc", f"query={shell}"])
    assert capsys.readouterr().out == gap.join(f"model={name}" for name in tagged_names("resnet50d")) + "\n"
    assert len(tagged_names("resnet50d")) > 1


class Shell:
    """An interactive bash in a folder, on a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "TERM": "dumb", "PS1": "$ ", "HOME": str(folder)}
        self.process, self.terminal = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)

    def shell_command(self, keys: str, expected: str) -> str:
        """What the terminal shows after these keys, once it shows `expected`; or all that it showed in 60 seconds."""
        os.write(self.terminal, keys.encode())
        shown, deadline = "", time.monotonic() + 60
        while expected not in shown and select.select([self.terminal], [], [], deadline - time.monotonic())[0]:
            shown += os.read(self.terminal, 65536).decode(errors="replace")
        return shown

    def close(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.terminal)


TABS = ((" strat\t", "egy"), ("=allreduce_\t", "hooks"), (" optimizer.\t\t", "optimizer.weight_decay="))


@pytest.mark.parametrize(("program", "tabs"), [("lockstep train", TABS), ("python train.py", TABS[:1])])
def test_tab_completes_a_line_in_bash(program: str, tabs: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    if program == "lockstep train":
        shell = Shell(ROOT)
    else:  # of a new project
        assert forked("lockstep", "new", "mine", cwd=tmp_path).code == 0
        shell = Shell(tmp_path / "mine")
    try:
        install = f'eval "$({program.removesuffix(" train")} -sc install=bash)"; echo rea"dy"\n'
        shell.shell_command(install, "ready\r\n")
        os.write(shell.terminal, program.encode())
        for keys, expected in tabs:
            assert expected in shell.shell_command(keys, expected)
    finally:
        shell.close()


@pytest.mark.parametrize("words", ["model=resnet50d", "model=resnet50d.ra2_in1k", "model=timm model.name=resnet50d"])
def test_a_name_of_timm_composes_to_every_field_of_its_class(words: str) -> None:
    node = composed(*words.split(), "model.drop_rate=0.1")["model"]
    assert node == components.node(Timm(name=words.rpartition("=")[2], drop_rate=0.1))


def test_files_and_names_are_listed_together_and_a_file_wins() -> None:
    with initialize_config_dir(str(ROOT / "conf")):
        options = GlobalHydra.instance().config_loader().get_group_options("model")
    assert {"digitnet", "resnet34", "resnet50d", "vit_tiny_patch16_224"} <= set(options)
    assert len(options) == len(set(options))
    assert composed("model=resnet34")["model"]["_target_"] == "lockstep.models.ResNet34"


def test_the_catalog_is_the_list_that_timm_gives_alone_and_with_a_tag() -> None:
    assert set(models_of(TIMM)) == set(timm.list_models())
    assert list(models_of(TIMM)) == sorted(models_of(TIMM))
    assert model_of("resnet50d") == ("timm", "resnet50d")
    assert model_of("resnet50d.ra2_in1k") == ("timm", "resnet50d.ra2_in1k")
    assert model_of("resnet50e") is None
    assert model_of("") is None


def test_reading_the_catalog_imports_neither_timm_nor_torch() -> None:
    loaded = "bool({'timm', 'torch'} & sys.modules.keys())"
    code = f"import sys, lockstep.config.options as c; c.models_of('timm'); sys.exit({loaded})"
    assert command(sys.executable, "-c", code).code == 0
