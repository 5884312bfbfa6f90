"""Completion of words with TAB; `model=NAME` for every name of timm, without a file and without importing timm."""

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import timm
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError
from omegaconf import OmegaConf

from helpers import ROOT, command, composed, forked, train
from hydra_plugins.lockstep import named_options
from hydra_plugins.lockstep.named_options import NamedOptions
from lockstep.cli.main import COMMANDS, main
from lockstep.config import components, options
from lockstep.config.command_line import answered
from lockstep.config.extensions import Extension
from lockstep.config.hydra_versions import initialize_config_dir
from lockstep.config.options import TIMM, model_of, models_of, tagged_names
from lockstep.config.schema import GROUPS
from lockstep.models import Timm
from lockstep.runtime import program, signals

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
        names = GlobalHydra.instance().config_loader().get_group_options("model")
    assert {"digitnet", "resnet34", "resnet50d", "vit_tiny_patch16_224"} <= set(names)
    assert len(names) == len(set(names))
    assert composed("model=resnet34")["model"]["_target_"] == "lockstep.models.ResNet34"


def test_the_catalog_is_the_list_that_timm_gives_alone_and_with_a_tag() -> None:
    assert set(models_of(TIMM)) == set(timm.list_models())
    assert list(models_of(TIMM)) == sorted(models_of(TIMM))
    assert model_of("resnet50d") == ("timm", "resnet50d")
    assert model_of("resnet50d.ra2_in1k") == ("timm", "resnet50d.ra2_in1k")
    assert model_of("resnet50e") is None
    assert model_of("") is None
    assert models_of("no_such_library") == models_of("this") == (), "a module has no models of its own"


def test_reading_the_catalog_imports_neither_timm_nor_torch() -> None:
    loaded = "bool({'timm', 'torch'} & sys.modules.keys())"
    code = f"import sys, lockstep.config.options as c; c.models_of('timm'); sys.exit({loaded})"
    assert command(sys.executable, "-c", code).code == 0


def test_options_without_a_file_are_listed_and_found_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_DECLARED", {**options._DECLARED})
    monkeypatch.setattr("lockstep.config.extensions.active", tuple)

    @options.option("metric", "of_mine")
    class Mine:
        half: float = 0.5

        def build(self, *_: object) -> Any: ...

    named = NamedOptions(provider="lockstep", path="lockstep://")
    places = {"": True, "/": True, "model": True, "/metric/": True, "hydra": False, "model/x": False}
    assert {place: named.is_group(place) for place in places} == places
    assert named.list("", None) == named.list("", ObjectType.GROUP) == [*GROUPS]
    assert (
        named.list("", ObjectType.CONFIG) == named.list("hydra", None) == named.list("model", ObjectType.GROUP) == []
    )
    assert named.list("metric", None) == named.list("/metric/", ObjectType.CONFIG) == ["of_mine"]
    models = named.list("model", None)
    assert {"resnet50d", "torchvision.resnet50"} <= {*models}
    assert "torchvision.resnet50d" not in models
    configs = dict.fromkeys(
        ("model/resnet50d", "/model/resnet50d.yaml", "model/torchvision.resnet18", "loss/object"), True
    )
    configs |= dict.fromkeys(("model/object", "dataset/object", "metric/of_mine", "metric/of_mine.yaml"), True)
    configs |= dict.fromkeys(
        ("loss/resnet50d", "metric/object", "model/zzz", "resnet50d", "metric", "hydra/x"), False
    )
    assert {place: named.is_config(place) for place in configs} == configs

    def loaded(place: str) -> Any:
        result = named.load_config(place)
        assert (result.provider, result.path, result.header) == ("lockstep", "lockstep://", {"package": None})
        return OmegaConf.to_container(result.config)

    of_timm = {"defaults": ["timm", "_self_"], "name": "resnet50d.ra2_in1k"}
    assert loaded("model/resnet50d.ra2_in1k") == of_timm
    assert loaded("model/torchvision.resnet18") == {"defaults": ["torchvision", "_self_"], "name": "resnet18"}
    mine: Any = Mine
    assert loaded("metric/of_mine") == {"of_mine": {"_target_": options.class_path(mine), "half": 0.5}}
    assert loaded("loss/object")["_target_"] == "lockstep.training.objects.LossObject"
    with pytest.raises(ConfigLoadError, match="Config not found: model/zzz"):
        named.load_config("model/zzz")


def test_the_search_path_is_ours_behind_that_of_extensions_and_no_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    both = (Extension("bare", "it", tmp_path / "conf"), Extension("mine", "it", tmp_path))
    monkeypatch.setattr("lockstep.config.extensions.active", lambda: both)
    for is_ours, expected in (
        (True, [("extension mine", f"file://{tmp_path}/conf"), ("lockstep", "lockstep://")]),
        (False, []),
    ):
        monkeypatch.setattr(named_options, "works_for_lockstep", lambda is_ours=is_ours: is_ours)
        path = ConfigSearchPathImpl()
        named_options.LockstepSearchPath().manipulate_search_path(path)
        assert [(entry.provider, entry.path) for entry in path.get_path()] == expected


LINES: dict[str, tuple[str, str, str]] = {
    # What the shell has, and what is left to Hydra of it, or what is written.
    "train": ("lockstep train seed", "lockstep seed", ""),
    "train in a folder": ("./bin/lockstep  train  seed", "./bin/lockstep  seed", ""),
    "trained": ("lockstep trained ", "", ""),
    "commands": ("lockstep e", "", "evaluate export\n"),
    "all commands": ("lockstep ", "", f"{' '.join(('train', *COMMANDS))}\n"),
    "train itself": ("lockstep tr", "", "train\n"),
    "files": ("lockstep evaluate ", "", ""),
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("flag", ["-sc", "--shell-completion"])
def test_a_shell_gets_commands_and_hydra_completes_the_words_of_train(
    name: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line, left, written = LINES[name]
    began: list[Any] = []
    monkeypatch.setattr(signals, "begin", lambda **options: began.append(options))
    monkeypatch.setattr("lockstep.cli.train.train_command", lambda: began.append(os.environ["COMP_LINE"]))
    monkeypatch.setattr(program, "finish", lambda: began.append("finished"))
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setattr(sys, "argv", ["lockstep", flag, "query=bash"])
    main()
    assert began == [{"says": signals.STOPPED}, *[left] * bool(left), "finished"]
    assert capsys.readouterr().out == written
    began.clear()
    monkeypatch.setattr(sys, "argv", ["lockstep", flag, "install=bash"])
    main()
    assert len(began) == 3, "Hydra installs it, whatever the line is"


def test_the_command_train_is_the_training_command_without_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[Any] = []
    monkeypatch.setattr(signals, "begin", lambda **options: began.append(options))
    monkeypatch.setattr("lockstep.cli.train.train_command", lambda: began.append([*sys.argv]))
    monkeypatch.setattr(program, "finish", lambda: None)
    monkeypatch.setattr(sys, "argv", ["lockstep", "train", "train"])
    main()
    assert began == [{"says": signals.STOPPED_EARLY}, ["lockstep", "train"]]


def test_a_command_with_the_word_train_behind_its_name_is_not_the_training_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began: list[Any] = []
    monkeypatch.setattr(signals, "begin", lambda **options: began.append(options))
    monkeypatch.setattr("lockstep.cli.main.run_command", lambda: began.append([*sys.argv]))
    monkeypatch.setattr("lockstep.cli.train.train_command", lambda: began.append("a training"))
    monkeypatch.setattr(program, "finish", lambda: None)
    words = ["lockstep", "evaluate", "run", "--split", "train"]
    monkeypatch.setattr(sys, "argv", [*words])
    main()
    assert began == [{"says": signals.STOPPED}, words]
