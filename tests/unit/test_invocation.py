"""The words of a command: its folder, those that a resume repeats, their quotes, and the program's extensions."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from helpers import ROOT
from lockstep.config import extensions
from lockstep.config.commands import override, parsed, quoted_path, repeated_words, shell_command, typed_strategy
from lockstep.config.composition import ConfigFiles, Invocation, check_hydra_overrides
from lockstep.config.extensions import Extension
from lockstep.config.hydra_versions import initialize_config_dir
from lockstep.config.recipes import ChosenFiles, words_for_hydra
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir, relative


def invoked(*words: str) -> Invocation:
    """The invocation of a job that Hydra runs with these words."""
    with initialize_config_dir(str(ROOT / "conf")):
        config = compose("config", overrides=["name=test", "hydra.mode=RUN", *words], return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        return Invocation.current()


def test_a_job_has_the_folder_that_its_command_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoked("epochs=3").folder is None
    assert invoked("hydra.run.dir=here").folder == tmp_path / "here"
    assert invoked("hydra.run.dir=.").folder == tmp_path, "the current folder, because the command says so"
    assert invoked("epochs=3").overrides == ("name=test", "epochs=3")


@pytest.mark.parametrize("sweep", [True, False])
def test_a_folder_that_a_command_does_not_use_is_refused(sweep: bool) -> None:
    used, ignored = ("sweep", "run") if sweep else ("run", "sweep")
    check_hydra_overrides([f"hydra.{used}.dir=x", "hydra.job.num=1"], sweep=sweep)
    with pytest.raises(InputError, match=rf"has no effect .* -m; name a folder with hydra\.{used}\.dir=FOLDER"):
        check_hydra_overrides([f"hydra.{ignored}.dir=x"], sweep=sweep)


@pytest.mark.parametrize(
    "word", ["hydra/sweeper=optuna", "hydra/launcher=ray", "hydra/sweeper=basic", "hydra.launcher.jobs=2"]
)
def test_a_launcher_or_sweeper_of_one_job_is_refused(word: str) -> None:
    check_hydra_overrides([word], sweep=True)
    with pytest.raises(InputError, match=f"{word} has no effect without -m; add -m, or remove it"):
        invoked(word)


def test_a_resume_repeats_what_names_the_config_files_of_its_run() -> None:
    files = ConfigFiles(name="mine", folder="/conf", searchpath=("hydra.searchpath=[/more]",))
    named = ["--config-name=mine", "--config-dir=/conf", "hydra.searchpath=[/more]"]
    assert [*files.words] == named
    assert ConfigFiles().words == ()
    command = " ".join(["python", "train.py", *named, "epochs=3", "'name=a b'"])
    assert repeated_words(command, ()) == ["python", "train.py", *named]
    assert repeated_words(f"{command} a.b=1 c.d=2", {"a.b"}) == ["python", "train.py", *named, "a.b=1"]


@given(st.text(alphabet="ab1e.=,'\" \\[](){}:~$%é/#&;!*-_", min_size=1, max_size=12))
def test_every_text_comes_back_through_the_shell_and_hydra(text: str) -> None:
    (word,) = shlex.split(shell_command([override("resume", text)]))
    assert str(parsed(word)) == text


@pytest.mark.parametrize("text", ["null", "a=b,c", "it's", 'say "x"', "a\\"])
def test_bash_reads_the_words_that_were_meant(text: str) -> None:
    words = ["python", "train.py", override("resume", text)]
    line = f"printf '%s\\n' {shell_command(words)}"
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == words


def test_the_last_strategy_of_a_line_is_the_one_that_is_typed() -> None:
    lines = {"strategy=ddp strategy=fsdp": "fsdp", "++strategy=ddp seed=1": "ddp", "strategy.cpu_offload=true": ""}
    assert {line: typed_strategy(line.split()) for line in lines} == lines


def test_a_path_that_exists_is_read_by_hydra_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed=1,lr=[2]").mkdir()
    for key in ("resume", "init_from", "dataset.path", "hydra.run.dir"):
        assert parsed(quoted_path(f"{key}=seed=1,lr=[2]")) == "seed=1,lr=[2]"
        assert parsed(quoted_path(f"{key}=~/photos")) == "~/photos"
    assert quoted_path("epochs=seed=1,lr=[2]") == "epochs=seed=1,lr=[2]"
    assert quoted_path("resume=not-there") == "resume=not-there"
    assert quoted_path("data_root=a,b") == "data_root=a,b"  # two folders, to sweep over


def test_the_newest_run_is_named_by_its_folder_which_stays_when_another_one_starts(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path / "first")
    run.mark_latest(tmp_path)
    for key in ("resume", "init_from"):
        word = quoted_path(f"{key}={tmp_path / 'latest'}")
        RunDir.at(tmp_path / "second").mark_latest(tmp_path)
        assert word == override(key, relative(run.path))
        run.mark_latest(tmp_path)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two packages in the folder of a program, which its interpreter finds."""
    names = ["extension_of_mine", "extension_of_hers"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    extensions.active.cache_clear()
    yield names
    extensions.active.cache_clear()


def test_an_extension_has_its_own_modules_and_none_whose_name_begins_alike() -> None:
    modules = {"mine": True, "mine.nets": True, "mine2": False, "mine_too.nets": False, "yours.mine": False}
    assert {name: Extension("mine", "named", Path()).has(name) for name in modules} == modules


def test_the_error_of_an_extension_is_placed_at_the_deepest_line_of_its_own(
    packages: list[str], tmp_path: Path
) -> None:
    package, folder = packages[0], tmp_path / packages[0]
    (folder / "__init__.py").write_text(f"from {package} import inner\n\ninner.fail()\n")
    (folder / "inner.py").write_text("import json\n\n\ndef fail():\n    json.loads('no JSON')\n")
    try:
        with pytest.raises(InputError, match=rf"^{folder}/inner.py:5: the extension {package} \(named\) cannot be"):
            Extension(package, "named", folder).load()
    finally:
        for name in (package, f"{package}.inner"):
            sys.modules.pop(name, None)


def test_a_rank_finds_every_extension_that_its_program_names(
    packages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not {extension.package for extension in extensions.active()} & {*packages}
    extensions.use(packages)
    assert {extension.package for extension in extensions.active()} >= {*packages}
    assert json.loads(os.environ[extensions.VARIABLE]) == dict.fromkeys(packages, str(tmp_path))
    monkeypatch.setattr(sys, "path", sys.path[1:])  # a rank is another program
    monkeypatch.setattr(sys, "path_importer_cache", {})
    extensions.active.cache_clear()
    assert {extension.package for extension in extensions.active()} >= {*packages}


@pytest.mark.parametrize(
    ("line", "listed", "expected"),
    [
        ("+debug=fast seed=1 debug=slow", False, "seed=1 +debug=slow"),
        ("+debug=fast seed=1 debug=slow", True, "seed=1 debug=slow"),
        ("debug=fast ~debug", False, ""),
        ("debug=fast ~debug", True, "~debug"),
        ("~debug debug=fast", True, "debug=fast"),
        ("seed=1 seed=2", False, "seed=1 seed=2"),
    ],
)
def test_of_a_users_group_the_last_choice_of_a_line_counts(line: str, listed: bool, expected: str) -> None:
    sources = [SimpleNamespace(is_group=lambda name: name == "debug")]
    files = ChosenFiles(frozenset({"debug"} if listed else ()), {}, frozenset())
    words = OverridesParser.create().parse_overrides(line.split())
    assert words_for_hydra(words, files, sources) == expected.split()
