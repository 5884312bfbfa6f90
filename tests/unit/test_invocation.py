"""The words of a command: its folder, those that a resume repeats, their quotes, and the program's extensions."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.main import get_args_parser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import open_dict

import lockstep
from helpers import ROOT, built, composed
from lockstep.config import command_line, commands, composition, extensions, help_page, options, suggest
from lockstep.config.commands import override, parsed, quoted_path, repeated_words, shell_command, typed_strategy
from lockstep.config.composition import ConfigFiles, Invocation, check_hydra_overrides, jobs_of, without_replaced
from lockstep.config.extensions import Extension
from lockstep.config.hydra_versions import IS_13, initialize_config_dir
from lockstep.config.recipes import ChosenFiles, words_for_hydra
from lockstep.config.schema import BLOCKS, GLOBAL, GROUPS
from lockstep.core.errors import InputError
from lockstep.core.fields import FOLDER, SHELL, personal_values
from lockstep.core.run_dir import RunDir, relative
from lockstep.training.objects import LossObject


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
    files = f"hydra.searchpath=[{tmp_path}]"
    assert invoked(files, "epochs=3").configs == ConfigFiles(searchpath=(files,))


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
    files = ConfigFiles(name="mine", folder="/my conf", searchpath=("hydra.searchpath=[/more]",))
    named = ["--config-name=mine", "--config-dir=/my conf", "hydra.searchpath=[/more]"]
    assert [*files.words] == named
    assert ConfigFiles().words == ()
    command = shlex.join(["python", "train.py", *named, "epochs=3", "name=a b"])
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
    (tmp_path / "list,x.csv").touch()
    assert parsed(quoted_path("dataset.path=list,x.csv")) == "list,x.csv", "a file that names no run"
    for word in ("resume=", "dataset.path=", "resume=~me/x", "init_from=latest"):
        assert quoted_path(word) == word


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
    for module in [module for module in sys.modules if module.partition(".")[0] in names]:
        del sys.modules[module]


def test_an_extension_has_its_own_modules_and_none_whose_name_begins_alike() -> None:
    modules = {"mine": True, "mine.nets": True, "mine2": False, "mine_too.nets": False, "yours.mine": False}
    assert {name: Extension("mine", "named", Path()).has(name) for name in modules} == modules


def test_the_error_of_an_extension_is_placed_at_the_deepest_line_of_its_own(
    packages: list[str], tmp_path: Path
) -> None:
    package, folder = packages[0], tmp_path / packages[0]
    (folder / "__init__.py").write_text(f"from {package} import inner\n\ninner.fail()\n")
    (folder / "inner.py").write_text("import json\n\n\ndef fail():\n    json.loads('no JSON')\n")
    with pytest.raises(InputError, match=rf"^{folder}/inner.py:5: the extension {package} \(named\) cannot be"):
        Extension(package, "named", folder).load()


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


def test_the_line_of_the_package_may_follow_comments_and_says_it_for_all_files_of_the_folder(
    packages: list[str], tmp_path: Path
) -> None:
    conf = tmp_path / packages[0] / "conf" / "of_mine"
    written(conf, {"first.yaml": "# Short runs.\n\n# @package _global_\nepochs: 3\n", "second.yaml": "epochs: 4\n"})
    written(conf, {"second2.yaml": "epochs: 5\n"})
    extensions.use(packages[:1])
    assert extensions.files("of_mine=first") == [conf / "first.yaml"]
    assert extensions.files("of_mine=second") == [conf / "second.yaml"]
    (conf / "first.yaml").unlink()
    with pytest.raises(InputError, match=r"second\.yaml: 'of_mine' is not a config group; .*`# @package _global_`"):
        extensions.files("of_mine=second")


def test_an_installed_extension_yields_to_an_option_of_the_program_and_two_of_one_name_are_refused(
    packages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(extensions.VARIABLE, raising=False)
    for name in packages:
        (folder := tmp_path / name / "conf" / "experiment").mkdir(parents=True)
        (folder / "first.yaml").write_text("# @package _global_\nepochs: 3\n")
    installed = [Extension(name, "installed", tmp_path / name) for name in packages]
    monkeypatch.setattr(extensions, "_installed", lambda: installed)
    with pytest.raises(InputError, match=rf"{packages[1]}/.*: experiment=first is an option of {packages[0]} too;"):
        extensions.active()
    for name in packages:
        extensions.use([name])
        assert [extension.package for extension in extensions.active()] == [name]
        assert extensions.files("experiment=first") == [tmp_path / name / "conf" / "experiment" / "first.yaml"]
    (folder / "first.yaml").rename(folder / "second.yaml")
    extensions.use(packages[:1])
    assert {extension.package: extension.origin for extension in extensions.active()} == {
        packages[1]: "installed",
        packages[0]: "named by the program",
    }
    assert extensions.files("experiment=none") == []


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


@pytest.mark.parametrize(
    ("program", "words"),
    [
        *(("train.py", ["python", "train.py"]), ("/a b/mine.py", ["python", "mine.py"])),
        *((name, ["lockstep", "train"]) for name in ("/usr/bin/lockstep", "/x/lockstep/__main__.py", "-c", "", "py")),
    ],
)
def test_a_command_that_is_told_begins_with_the_program_that_was_started(
    program: str, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(commands, "_WORDS", ["lockstep", "train"])
    monkeypatch.setattr(sys, "argv", [program, "seed=1"])
    monkeypatch.chdir(tmp_path)
    commands.started_as(program)
    assert (commands.program_words(), commands.program_name()) == (words, " ".join(words))
    script = str(tmp_path / program) if words[0] == "python" else ""
    assert commands.command_of_program() == [sys.executable, *([script] if script else ["-m", "lockstep", "train"])]


REFUSED = ("hydra={}", "hydra.output_subdir=x", "+hydra.job={}", "hydra.job.chdir=true", "++hydra.job.chdir=1")
TAKEN = ("hydra.job.chdir=false", "+hydra.job.chdir= False ", "hydra.job.name=x", "hydra", "name=é日", "hydra.jobs=1")


def test_no_word_moves_what_a_job_writes_and_every_word_is_unicode() -> None:
    for word in TAKEN:
        commands.check_word(word)
    for word in (*REFUSED, "name=\udcff", "\udc80=1"):
        with pytest.raises(InputError, match=r"remove |write it in UTF-8$"):
            commands.check_word(word)


def test_a_value_that_only_a_line_may_give_is_refused_with_the_line_that_gives_it_and_the_one_without() -> None:
    place = ("output_root", FOLDER, "/data/a b", "outputs")
    shell = ("launcher.setup", SHELL, ["module load a"], [])
    assert str(InputError(commands.refusal(place))).endswith(
        "but where a run writes and what it sends come from the command line alone; type 'output_root=/data/a b', or "
        "remove it with output_root=outputs"
    )
    both = commands.refusal(place, shell)
    assert both.startswith("output_root is '/data/a b' and launcher.setup is [")
    assert "but lines of shell come from the command line alone" in both
    assert both.endswith("or remove it with launcher=slurm output_root=outputs 'launcher.setup=[]'")


NETS = """import lockstep

@lockstep.option("model")
class WideNet: ...

@option("loss", "own",)
@final
class Other: ...

@lockstep.option(
    "metric", name="mine"
)
class Third: ...

@option("nogroup")
class Fourth: ...
"""


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_the_options_of_an_extension_are_read_from_its_files_and_none_is_imported(
    packages: list[str], tmp_path: Path
) -> None:
    package, folder, of_job = packages[0], tmp_path / packages[0], f"{GLOBAL}\nsteps: 3\n"
    written(folder, {"nets.py": NETS, "sub/deep.py": "@option('callback')\nclass Hello2You: ...\n"})
    written(folder, {"conf/model/wide_net.yaml": "a: 1\n", "conf/model/wider.yaml": "a: 1\n"})
    written(folder, {"conf/experiment/first.yaml": of_job, "conf/debug/fast.yaml": of_job, "conf/debug/x.yaml": ""})
    extensions.use([package])
    (extension,) = (extension for extension in extensions.active() if extension.package == package)
    assert extension.option_names() == [
        *(("model", "wide_net"), ("loss", "own"), ("metric", "mine"), ("callback", "hello2_you")),
        *(("debug", "fast"), ("debug", "x"), ("experiment", "first"), ("model", "wider")),
    ]
    assert extension.declaring_files()["callback", "hello2_you"] == folder / "sub" / "deep.py"
    assert extensions.files("debug=fast") == [folder / "conf" / "debug" / "fast.yaml"]
    assert extensions.own_groups() == {"debug": ["fast", "x"]}
    assert f"{package} (named by the program)" in extensions.named_extensions()
    assert package not in sys.modules
    sentence = suggest.import_note("callback", "hello2_you")
    assert sentence.endswith(
        f"but the package does not import it: add `import {package}.sub.deep` to its __init__.py"
    )
    (folder / "sub" / "deep.py").rename(folder / "sub" / "__init__.py")
    assert f"add `import {package}.sub` to" in suggest.import_note("callback", "hello2_you")
    assert suggest.import_note("callback", "hello") == ""


@pytest.mark.parametrize("name", ["no_such_package", "json.decoder", ".relative", "", "no_such.part", "json.no.part"])
def test_what_is_no_package_is_no_extension(name: str, packages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/mine.py"])
    sentence = (
        rf"^the extension {re.escape(name)} \(named by mine\.py\) is not a package that can be imported; install"
    )
    with pytest.raises(InputError, match=sentence):
        extensions.use([name])
    assert extensions.VARIABLE not in os.environ
    extensions.use(packages[:1])
    extensions.use([])
    assert [*json.loads(os.environ[extensions.VARIABLE])] == packages[:1], "a call without any takes none away"
    assert packages[0] in [extension.package for extension in extensions.active()]
    monkeypatch.delenv(extensions.VARIABLE)
    extensions.use([])
    assert packages[0] not in [extension.package for extension in extensions.active()], "each call looks again"


def test_a_rank_may_name_the_extensions_of_its_program_again(
    packages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(extensions.VARIABLE, json.dumps({packages[0]: str(tmp_path)}))
    monkeypatch.setattr(sys, "path", sys.path[1:])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    extensions.use(packages[:1])
    assert sys.path.count(str(tmp_path)) == 1
    assert sys.path[-1] == str(tmp_path), "its neighbours hide no package that is installed"
    extensions.use(packages[:1])
    assert sys.path.count(str(tmp_path)) == 1, "what is found needs no other path"


def test_of_the_groups_that_a_run_keeps_the_last_choice_counts_with_the_keys_of_the_line(
    packages: list[str], tmp_path: Path
) -> None:
    of_steps = {name: f"{GLOBAL}\nsteps: {steps}\nbatch: 9\n" for name, steps in (("fast", 3), ("slow", 30))}
    written(tmp_path / packages[0] / "conf" / "debug", {f"{name}.yaml": text for name, text in of_steps.items()})
    extensions.use(packages[:1])
    run, files = ["name=x", "debug=fast", "batch=5"], ConfigFiles()
    with composition.composing():
        assert composition.overrides_that_fit(run, ["debug=slow"], files) == run
        both = [composition.recompose(run, words, files) for words in ((), ("debug=slow",), ("batch=6",))]
    assert [(values["steps"], values["batch"]) for values in both] == [(3, 5), (30, 5), (3, 6)]


NO_OPTION = {
    "models/mine.yaml": ("a: 1\n", "'models' is not a config group; put it into conf/GROUP/NAME.yaml, or .* 'model'"),
    "debug/mine.yaml": ("steps: 3\n", f"'debug' is not a config group; .* `{GLOBAL}` if it sets keys of the job"),
    "seed/mine.yaml": (f"{GLOBAL}\n", "'seed' is not a config group"),
    "hydra/mine.yaml": (f"{GLOBAL}\n", "'hydra' is not a config group"),
    "model/mine/mine.yaml": ("a: 1\n", "'model/mine' is not a config group"),
    "mine.yaml": ("a: 1\n", r"'\.' is not a config group"),
    "model/linear.yaml": ("a: 1\n", "model=linear is an option of Lockstep; rename the file"),
    "model/resnet50d.yaml": ("a: 1\n", "model=resnet50d is an option of Lockstep; rename the file"),
    "experiment/deit_s.yaml": (
        f"{GLOBAL}\nsteps: 3\n",
        "experiment=deit_s is an option of Lockstep; rename the file",
    ),
    "schedule/step.yaml": ("a: 1\n", "schedule=step is an option of Lockstep; rename the file"),
}


@pytest.mark.parametrize("name", NO_OPTION)
def test_a_file_of_an_extension_that_can_be_no_option_is_named(
    name: str, packages: list[str], tmp_path: Path
) -> None:
    text, sentence = NO_OPTION[name]
    written(tmp_path / packages[0] / "conf", {name: text})
    extensions.use(packages[:1])
    with pytest.raises(InputError, match=rf"^{tmp_path}/{packages[0]}/conf/{name}: {sentence}"):
        extensions.active()


BROKEN = {
    "x = = 3\n": r"/__init__\.py:1: the extension {} \(it\) cannot be imported: SyntaxError: invalid syntax",
    "\nif True:\nx = 1\n": r"/__init__\.py:3: the extension {} \(it\) cannot be imported: IndentationError: ",
    "\n1 / 0\n": r"/__init__\.py:2: .* ZeroDivisionError: division by zero$",
    "\n\nimport no_such_module\n": r"/__init__\.py:3: .* ModuleNotFoundError: No module named 'no_such_module'$",
    "from lockstep.core.errors import InputError\nraise InputError('its own sentence')\n": "^its own sentence$",
}


@pytest.mark.parametrize("text", BROKEN)
def test_an_extension_that_cannot_be_imported_is_one_sentence_with_its_place(
    text: str, packages: list[str], tmp_path: Path
) -> None:
    written(tmp_path, {f"{packages[0]}/__init__.py": text})
    extension = Extension(packages[0], "it", tmp_path / packages[0])
    with pytest.raises(InputError, match=BROKEN[text].format(packages[0])):
        extension.load()
    extensions.use(packages[:1])
    with pytest.raises(
        InputError, match=BROKEN[text].format(packages[0]).replace(r"\(it\)", r"\(named by the program\)")
    ):
        extensions.class_of("model", f"{packages[0]}.nets.Flat")
    with pytest.raises(
        InputError, match=rf"^{tmp_path}/{packages[1]}: the extension {packages[1]}.none \(it\) cannot"
    ):
        Extension(packages[1], "it", tmp_path / packages[1]).load(f"{packages[1]}.none")


MODULE = """
import lockstep
from lockstep.models.nets import Network
from torch import nn

@lockstep.option("model", "flat_of_mine")
class Flat(Network):
    def build(self, classes, input_shape):
        return nn.Flatten()

class Undeclared(Network):
    build = Flat.build
"""


def test_a_node_names_the_declared_classes_of_an_extension_and_nothing_else_of_it(
    packages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "_DECLARED", {**options._DECLARED})
    package = packages[0]
    late = MODULE.replace("flat_of_mine", "late_of_mine")
    written(tmp_path, {f"{package}/nets.py": MODULE, f"{package}/late.py": late})
    for module in (f"{package}.nets", f"{package}.nets.deeper", package):
        assert not extensions.import_extension(module)
    extensions.use(packages)
    imported = {f"{package}.none": False, f"{package}.none.deeper": False, package: True, f"{package}.nets": True}
    assert {module: extensions.import_extension(module) for module in imported} == imported
    cls = extensions.class_of("model", f"{package}.nets.Flat")
    assert (cls.__module__, cls.__qualname__) == (f"{package}.nets", "Flat")
    assert f"{package}.late" not in sys.modules
    assert extensions.class_of("model", f"{package}.late.Flat") is options.declared("model")["late_of_mine"]
    for group, name in (
        ("model", "Undeclared"),
        ("model", "nn.Flatten"),
        ("model", "Flat.build"),
        ("loss", "Flat"),
    ):
        expected = rf"^mine\._target_ is '{package}\.nets\.{name}', expected a class of {GROUPS[group]}; choose one"
        with pytest.raises(InputError, match=rf"{expected} .*\(extensions here: .*{package} \(named by the"):
            extensions.class_of(group, f"{package}.nets.{name}", "mine")
    assert "flat_of_mine" in extensions.classes_of_user("model")
    assert not {"linear", "object"} & extensions.classes_of_user("model").keys()
    assert extensions.is_importable(cls)
    near = [type("Flat", (cls,), {"__module__": f"{package}{end}"}) for end in ("", ".deep.er", "_too", "2.nets")]
    assert [*map(extensions.is_importable, near)] == [True, True, False, False]
    assert ("model", "flat_of_mine") not in extensions.of_program()
    extensions.active.cache_clear()
    monkeypatch.delenv(extensions.VARIABLE)
    assert not extensions.is_importable(cls)
    assert extensions.of_program()["model", "flat_of_mine"] is cls


def test_an_object_of_a_program_is_an_option_of_three_groups_with_the_words_that_give_it() -> None:
    classes = {group: extensions.of_objects(group) for group in GROUPS}
    names = {"model": "ModelObject", "dataset": "DatasetObject", "loss": "LossObject"}
    assert {group: of["object"].__name__ for group, of in classes.items() if of} == names
    parts = {group: of["object"](type="Mine") for group, of in classes.items() if of}
    assert all(map(extensions.is_object, parts.values()))
    assert not extensions.is_object(type("Mine", (), {"__module__": "theirs.objects"})()), "a module of that name"
    words = ["model=Mine(...)", "dataset=lockstep.dataset(...)", "loss=Mine"]
    assert extensions.arguments_of(dict(reversed(parts.items()))) == words
    job = {"model": built("model=linear").model, "loss": parts["loss"], "name": "x"}
    assert extensions.arguments_of(job) == ["loss=Mine"]
    for group, cls in names.items():
        assert extensions.class_of(group, f"lockstep.training.objects.{cls}") is classes[group]["object"]
        with pytest.raises(InputError, match=rf"^{group}\._target_ is"):
            extensions.class_of(group, "lockstep.training.objects.OfProgram")


@pytest.mark.parametrize(("folder", "file"), [("dist-info", "METADATA"), ("egg-info", "PKG-INFO")])
def test_an_installed_extension_is_found_by_its_entry_point(
    packages: list[str], tmp_path: Path, folder: str, file: str
) -> None:
    before = extensions._installed()
    metadata = "Metadata-Version: 2.1\nName: theirs\nVersion: 0.1.0\n"
    point = f"[lockstep.extensions]\nany = {packages[1]}\n"
    written(tmp_path / f"theirs-0.1.0.{folder}", {file: metadata, "entry_points.txt": point})
    (added,) = [extension for extension in extensions._installed() if extension not in before]
    assert added == Extension(packages[1], "installed by theirs 0.1.0", tmp_path / packages[1])
    written(tmp_path / f"theirs-0.1.0.{folder}", {"entry_points.txt": point.replace(packages[1], "gone")})
    with pytest.raises(InputError, match=r"^the extension gone \(installed by theirs 0\.1\.0\) is not a package"):
        extensions._installed()


PROJECT = '[project]\nname = "x"\n[project.entry-points."lockstep.extensions"]\n'
PROJECTS = {
    f'{PROJECT}one = "its.other"\ntwo = "extension_of_mine"\nthree = "a"\n': "a, extension_of_mine, its.other",
    f'{PROJECT}one = "extension_of_hers"\ntwo = "a"\n': "a",
    f'{PROJECT}one = "extension_of_hers"\n': "",
    PROJECT: "",
    "no = toml = ": "",
    "[tool.x]\n": "",
    'project = "x"\n': "",
    "[project]\nentry-points = [1]\n": "",
    '[project.entry-points]\n"lockstep.extensions" = "mine"\n': "",
}


@pytest.mark.parametrize("text", PROJECTS, ids=lambda text: str(len(text)))
def test_the_project_of_the_current_folder_is_named_if_it_is_not_installed(
    text: str, packages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    extensions.use(packages[1:])
    assert extensions.not_installed() == ""
    (tmp_path / "pyproject.toml").write_text(text)
    named = PROJECTS[text]
    way = "use python train.py, or pip install -e ."
    expected = f" The package {named} of this folder is not installed: {way}" if named else ""
    assert extensions.not_installed() == expected
    (tmp_path / "pyproject.toml").write_bytes(b"\xe9")
    assert extensions.not_installed() == ""


def test_the_help_has_the_options_of_extensions_behind_ours_and_their_keys(
    packages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "_DECLARED", {**options._DECLARED})
    monkeypatch.setenv("COLUMNS", "90")
    package, of_job = packages[0], f"{GLOBAL}\n# A first try.\nsteps: 3\n"
    fields = '\n    """One layer.\n\n    More of it.\n    """\n\n    width: list[int] = [8, 16]  # of each layer\n'
    text = MODULE.replace("class Flat(Network):\n", f"class Flat(Network):{fields}\n")
    written(tmp_path / package, {"__init__.py": text, "conf/model/flatter.yaml": "_target_: x.Y\nwidth: 3\n"})
    written(tmp_path / package, {"conf/debug/fast.yaml": of_job, "conf/experiment/first.yaml": of_job})
    extensions.use([package])
    help_page.show_help([])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 90
    whole = " ".join("\n".join(lines).split())
    groups = whole.partition("Groups,")[2]
    model = groups.partition(" model ")[2].partition(" dataset ")[0].split()
    assert model[-2:] == ["flat_of_mine*", "flatter*"]
    assert groups.partition(" experiment ")[2].partition(" debug ")[0].split()[-1] == "first*", "of several lines"
    assert f" debug fast* * of {package}" in whole
    assert package not in sys.modules
    help_page.show_help(
        ["model=flat_of_mine", "model=flatter", "debug=fast", "seed", "experiment=first", "loss=none"]
    )
    out = capsys.readouterr().out
    assert out.startswith("model=flat_of_mine, its keys as model.KEY=VALUE:\n# One layer.\n")
    assert "width: [8, 16]" in out
    assert "model=flatter, its keys as model.KEY=VALUE:\nwidth: 3\n" in out
    assert "debug=fast sets:\n# A first try.\nsteps: 3\n" in out
    assert "experiment=first sets:\n# A first try.\nsteps: 3\n" in out
    assert out.endswith(" --help` shows all options and keys.\n")
    assert not {"_target_", GLOBAL, "loss=none", "More of it"} & {*out.splitlines(), *out.split()}


def checked(*words: str) -> list[str]:
    return command_line.checked_words(words, get_args_parser())


def test_hydra_gets_the_overrides_of_a_line_before_its_flags_and_each_as_often_as_it_is_typed() -> None:
    assert checked("--cfg", "job", "seed=1", "-m", "batch=2") == ["seed=1", "batch=2", "--cfg", "job", "-m"]
    assert checked("a=1", "b=2", "a=1") == ["a=1", "b=2", "a=1"]
    assert checked() == []
    with pytest.raises(InputError, match=r"^--experimental-rerun: 'x\.pickle' may have a pickle .* resume=RUN"):
        checked("--experimental-rerun", "x.pickle")


UNKNOWN = {
    "--lr 0.1": "--lr is not a flag of this program; a key is written without dashes, KEY=VALUE: optimizer.lr=0.1",
    "--lr=0.1 seed=3": "--lr=0.1 is not a flag of this program; .*, KEY=VALUE: optimizer.lr=0.1",
    "--lr --epochs 3": "--lr, --epochs is not a flag of this program; .*: optimizer.lr=VALUE epochs=3",
    "--lr seed=3": "--lr is not a flag of this program; .*: optimizer.lr=VALUE",
    "--notes=": "--notes= is not a flag of this program; .*: notes=$",
    "--epochs": "--epochs is not a flag of this program; .*: epochs=VALUE",
    "--lr 0.1 --zzz": "--lr, --zzz is not a flag of this program; .*: `lockstep train --cfg job` shows them all",
    "--lr 0.1 --shuffle": "--shuffle is not a flag of this program: training images are in a new random order",
    "--batch-size 8": r".*, KEY=VALUE \(batch counts the images of all devices\): batch=8",
}


@pytest.mark.parametrize("line", UNKNOWN)
def test_flags_of_other_programs_are_answered_together_or_with_all_keys(line: str) -> None:
    with pytest.raises(InputError, match=rf"^{UNKNOWN[line]}"):
        checked(*line.split())


def test_a_line_that_asks_for_the_help_or_the_version_trains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help"):
        assert command_line.answered(["train.py", "optimizer=sgd", flag])
        assert capsys.readouterr().out.startswith("optimizer=sgd, its keys")
    assert command_line.answered(["train.py", "--version"])
    assert capsys.readouterr().out == f"lockstep {lockstep.__version__}\n"
    assert not command_line.answered(["train.py", "seed=1"])
    lines = (["-sc", "query=fish"], ["name=query=zsh", "-sc", "query=bash"], ["model.query=x"], ["a"], [])
    assert [command_line.shell_asking(words) for words in lines] == ["fish", "bash", "", "", ""]


def test_a_key_is_what_stands_before_the_first_sign_of_equality() -> None:
    keys = {"epochs=3": "epochs", "++a.b = c=d": "a.b", "~model": "model", "+x": "x", "": ""}
    assert {word: commands.key_of(word) for word in keys} == keys
    assert commands.parsed("a=1,2") is None, "several values are none"
    assert commands.parsed("a=choice(1,2)") is None
    assert commands.parsed("a=[1") is None
    assert (commands.parsed("a=null"), commands.parsed("a=1"), commands.parsed("a='1,2'")) == (None, 1, "1,2")
    commands.program_words().append("seed=1")
    assert commands.program_words() == ["lockstep", "train"]
    words = {"a": None, "b": True, "c": [1, "x"], "d": Path("x y"), "e": Path("a,b"), "f": 'say "x"', "g": "1"}
    texts = ["a=null", "b=true", 'c=[1, "x"]', "d=x y", 'e="a,b"', "f='say \"x\"'", 'g="1"']
    assert [override(key, value) for key, value in words.items()] == texts


def test_a_run_is_resumed_with_what_only_its_line_says_or_by_a_call_with_its_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "_WORDS", ["python", "mine.py"])
    run = RunDir.at(tmp_path / "runs" / "one")
    job = built("logger=[wandb]", "output_root=elsewhere")
    again = "resume=runs/one epochs=9"
    assert commands.resume_command(run, job, "epochs=9") == f"python mine.py {again}", "the line cannot be read"
    line = "python train.py --config-name=mine logger.wandb.entity=me output_root=there seed=1 'name=a b'"
    run.command.write_text(f"{line}\n")
    again_with = "python train.py --config-name=mine"
    personal = {key for key, *_ in personal_values(job)} & {"logger.wandb.entity"}
    again_with += " logger.wandb.entity=me" * bool(personal)
    assert commands.resume_command(run, job, "epochs=9") == f"{again_with} {again}"
    parts = replace(job, model=LossObject(type="Net"), loss=LossObject(type="mine"))
    call = 'lockstep.train(["resume=runs/one", "epochs=9"], model=Net(...), loss=mine)'
    assert commands.resume_command(run, parts, "epochs=9") == call


@pytest.mark.parametrize("own", [True, False])
def test_an_extension_is_imported_with_our_threads_in_a_process_of_our_own_alone(
    own: bool, packages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    monkeypatch.setattr(extensions, "is_own_process", lambda: own)
    monkeypatch.setattr(extensions, "configure_native_threads", lambda: threads.append(True))
    extension = Extension(packages[0], "it", tmp_path / packages[0])
    extension.load()
    assert threads == [True] * own
    assert extension.conf is None
    (extension.folder / "conf").touch()
    assert extension.conf is None, "a file is no folder of configs"


@pytest.mark.parametrize(
    ("files", "words", "are_foreign"),
    [
        (ConfigFiles(), (), False),
        (ConfigFiles(name="mine"), ("--config-name=mine",), False),
        (ConfigFiles(folder="/conf"), ("--config-dir=/conf",), True),
        (ConfigFiles(searchpath=("hydra.searchpath=[/more]",)), ("hydra.searchpath=[/more]",), True),
    ],
)
def test_files_of_a_command_are_foreign_if_a_folder_of_them_is_named(
    files: ConfigFiles, words: tuple[str, ...], are_foreign: bool
) -> None:
    assert (files.words, files.are_foreign) == (words, are_foreign)


def test_a_command_is_the_program_its_files_and_its_overrides_quoted_for_a_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commands, "_WORDS", ["python", "mine.py"])
    files = ConfigFiles(name="other", folder="/my conf")
    own = Invocation(overrides=("seed=1", "name=a b"), sweep=False, folder=None, hydra="", configs=files)
    assert own.command == "python mine.py --config-name=other '--config-dir=/my conf' seed=1 'name=a b'"


def test_the_files_of_a_command_are_those_of_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [("hydra", "pkg://hydra.conf"), ("main", "file:///ours"), ("command-line", "file:///a b/conf")]
    of_line = [SimpleNamespace(provider=provider, path=path) for provider, path in sources]
    words = ["hydra.job.name=x", "+hydra.searchpath=[/more]", "hydra.searchpath_of_mine=1", "hydra.searchpath=[/b]"]
    hydra = SimpleNamespace(
        runtime=SimpleNamespace(config_sources=of_line),
        job=SimpleNamespace(config_name="mine"),
        overrides=SimpleNamespace(hydra=words),
    )
    monkeypatch.setattr(HydraConfig, "get", lambda: hydra)
    assert ConfigFiles.current() == ConfigFiles(name="mine", folder="/a b/conf", searchpath=(words[1], words[3]))
    hydra.runtime.config_sources = of_line[:2]
    assert ConfigFiles.current().folder == ""


def test_a_job_of_a_sweep_has_its_folder_in_the_sweeps_and_the_words_of_the_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "seed=1,2", "train.eval_batch=${batch}"])
    words = ["name=test", "hydra.mode=MULTIRUN", "hydra.sweep.dir=swept", "hydra.sweep.subdir=000", "seed=1"]
    with initialize_config_dir(str(ROOT / "conf")):
        config = compose("config", overrides=words, return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        current = Invocation.current()
        moved = compose("config", overrides=[*words, "hydra.run.dir=x"], return_hydra_config=True)
        HydraConfig.instance().set_config(moved)
        with pytest.raises(InputError, match=r"^hydra\.run\.dir=x has no effect with -m; name a folder with"):
            Invocation.current()
    assert (current.sweep, current.folder) == (True, tmp_path / "swept" / "000")
    assert current.overrides == ("name=test", "seed=1")
    assert current.own_words == ("-m", "seed=1,2")
    assert "hydra:\n" in current.hydra


REFERENCES = {
    "train.eval_batch=${batch}": ["train.eval_batch=32"],
    "++seed=${batch}": ["++seed=32"],
    "data_root='a ${name}'": ["data_root=a test"],
    "cost={usd_per_gpu_hour: ${batch}}": ["cost.usd_per_gpu_hour=32.0"],
    "optimizer.betas=[0.5,${train.mix_switch}]": ["optimizer.betas=[0.5, 0.5]"],
    "notes=${hydra:runtime.choices.model}": ["notes=linear"],
    "notes='1${batch}'": ['notes="132"'],
}


@pytest.mark.parametrize("word", REFERENCES)
def test_a_reference_of_a_line_has_its_value_in_the_words_of_the_job(word: str) -> None:
    job = invoked("batch=32", "model=linear", word)
    assert [*job.overrides] == ["name=test", "batch=32", "model=linear", *REFERENCES[word]]
    assert job.own_words == ("name=test", "batch=32", "model=linear")


def test_the_config_of_a_command_has_no_keys_that_a_recipe_sets_for_another_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["name=test", "hydra.mode=RUN", "experiment=photos", "dataset=fake", "batch=4", "model=linear"]
    with initialize_config_dir(str(ROOT / "conf")):
        config = compose("config", overrides=words, return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]  # as Hydra gives it to a job
    assert {*composition.of_command(config)["model"]} == {*composed("model=linear")["model"]}
    assert "experiment=photos sets model.pretrained: not for model=linear" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "has_key"), [("optimizer.lr=0.1", True), ("optimizer=sgd", False)])
def test_a_key_that_a_recipe_misspells_is_left_out_where_another_option_is_typed_alone(
    word: str, has_key: bool
) -> None:
    words = ["name=test", "hydra.mode=RUN", "experiment=photos", "dataset=fake", "batch=4", word]
    with initialize_config_dir(str(ROOT / "conf")):
        config = compose("config", overrides=words, return_hydra_config=True)
    with open_dict(config):
        config.optimizer.head_rl = 0.1  # as if it were in the recipe
    assert ("head_rl" in composition.to_dict(config)["optimizer"]) is has_key


def test_a_reference_to_all_keys_of_a_block_stays_as_it_is() -> None:
    words = ("model=resnet50d", "+model.options={a: 1}", "+model.options.b=${input}")
    assert invoked(*words).overrides == ("name=test", *words)


def test_words_without_a_reference_and_removals_stay_as_they_are() -> None:
    words = ("batch=32", "~optimizer.weight_decay", "notes='a=b'", "+model={of_mine: 1}", "metric=[f1]")
    assert invoked(*words).overrides == ("name=test", *words)


SENTENCES = {
    ("hydra.run.dir=x", True): "hydra.run.dir=x has no effect with -m; name a folder with hydra.sweep.dir=FOLDER",
    ("+hydra.run.x=y", True): "+hydra.run.x=y has no effect with -m; name a folder with hydra.sweep.dir=FOLDER",
    (
        "hydra.sweep.dir=x",
        False,
    ): "hydra.sweep.dir=x has no effect without -m; name a folder with hydra.run.dir=FOLDER",
    ("hydra/launcher=ray", False): "hydra/launcher=ray has no effect without -m; add -m, or remove it",
    ("~hydra.sweeper.x", False): "~hydra.sweeper.x has no effect without -m; add -m, or remove it",
    ("hydra.launchers=1", False): "",
    ("hydra.runs=1", True): "",
    ("hydra.job.num=1", False): "",
}


@pytest.mark.parametrize(("word", "sweep"), SENTENCES)
def test_a_word_without_an_effect_is_refused_behind_others_that_have_one(word: str, sweep: bool) -> None:
    words = ["hydra.verbose=true", word, "hydra.job.name=x"]
    if SENTENCES[word, sweep]:
        with pytest.raises(InputError, match=f"^{re.escape(SENTENCES[word, sweep])}$"):
            check_hydra_overrides(words, sweep=sweep)
    else:
        check_hydra_overrides(words, sweep=sweep)


def test_a_pattern_of_names_is_each_option_that_hydra_has() -> None:
    with initialize_config_dir(str(ROOT / "conf")):
        loader = GlobalHydra.instance().config_loader()
        jobs = jobs_of(["schedule=glob(co*)", "seed=1"], loader)
    assert jobs == [[f"schedule={name}", "seed=1"] for name in ("constant", "cosine")]


def test_an_interval_is_its_two_ends_in_a_search_and_refused_in_other_sweeps() -> None:
    words = ["seed=1,2", "optimizer.lr=interval(0.1,0.5)", "model=linear"]
    assert jobs_of(words, searches=True) == [
        [f"seed={seed}", f"optimizer.lr={rate}", "model=linear"] for seed in (1, 2) for rate in (0.1, 0.5)
    ]
    with pytest.raises(InputError, match=r"^optimizer\.lr=interval\(0\.1,0\.5\) is an interval, .*; use hydra/swee"):
        jobs_of(words)
    assert jobs_of([]) == [[]]


@pytest.mark.skipif(IS_13, reason="Hydra 1.3 has no word that adds to a list")
@pytest.mark.filterwarnings("ignore:extend_list")
def test_all_words_that_add_to_a_list_count_in_each_job() -> None:
    words = ["tags=[x]", "tags=extend_list(a)", "seed=1,2", "tags=extend_list(b)"]
    assert jobs_of(words) == [[*words[:2], f"seed={seed}", words[3]] for seed in (1, 2)]


def test_a_run_is_composed_again_from_the_files_of_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def compose_nothing(name: str, **options: Any) -> None:
        composed_from.append((name, *options.values()))
        raise InputError("no more of it")

    composed_from: list[Any] = []
    monkeypatch.setattr(composition, "compose", compose_nothing)
    files = ConfigFiles(name="mine", searchpath=("hydra.searchpath=[/more]",))
    run = ["seed=1", "model=linear"]
    with pytest.raises(InputError, match="no more of it"):
        composition.recompose(run, ("seed=2",), files)
    with pytest.raises(InputError, match="no more of it"):
        composition.overrides_that_fit(run, ["model=basicnet", "seed=2"], files)
    for word in ("seed=2", "model={width: 3}", "optimizer.lr=1", *(f"{block}={{key: 1}}" for block in BLOCKS)):
        assert composition.overrides_that_fit(run, [word], files) == run, "no other option"
    assert composed_from == [
        ("mine", ["hydra.searchpath=[/more]", *run, "seed=2"], True),
        ("mine", ["hydra.searchpath=[/more]", "model=linear"], False),
    ]


def test_of_an_earlier_command_the_keys_go_that_another_option_lacks_and_none_whose_name_begins_alike() -> None:
    stored = ["launcher=slurm", "launcher.time=2h", "launcher.timeout=600", "+launcher.sbatch.qos=high", "seed=1"]
    left = ["launcher=slurm", "launcher.timeout=600", "seed=1"]
    with initialize_config_dir(str(ROOT / "conf")):
        assert composition.overrides_that_fit(stored, ["launcher=spawn"], ConfigFiles()) == left
        assert composition.overrides_that_fit(stored, ["model=linear"], ConfigFiles()) == stored
        removed = ["~seed", *stored]
        assert composition.overrides_that_fit(removed, ["launcher=spawn", "seed=2"], ConfigFiles()) == left


def test_of_earlier_words_those_go_whose_option_or_key_is_chosen_anew() -> None:
    earlier = [
        "model=linear",
        "model.width=3",
        "++optimizer.lr=1",
        "seed=1",
        "train.ema=0.5",
        "metric.f1.average=none",
    ]
    gone = {
        "model=basicnet": ["model=linear"],
        "+optimizer.lr=2": ["++optimizer.lr=1"],
        "model.width=4": ["model.width=3"],
        "metric.f1.average=micro": ["metric.f1.average=none"],
        "seed=2": [],
        "train.ema=0.6": [],
        "model={width: 3}": [],
        "~model": [],
        "tags=extend_list(a)": [],
    }
    for word, replaced in gone.items():
        assert without_replaced(earlier, [word]) == [text for text in earlier if text not in replaced], word
    assert without_replaced(["model={width: 1}"], ["model=linear"]) == ["model={width: 1}"], "several keys"


def test_a_job_is_no_sweep_and_its_config_has_no_reference_that_was_escaped() -> None:
    with pytest.raises(
        InputError, match=r"^hydra\.mode=MULTIRUN requests a sweep, expected one job; a sweep is `lock"
    ):
        composition.composed(["name=x", "hydra.mode=MULTIRUN"])
    with pytest.raises(InputError, match=r"^'hydra\.job\.chdir=true': a job stays in the folder of its command; rem"):
        composition.composed(["name=x", "hydra.job.chdir=true"])
    assert composition.composed(["name=x", "hydra.sweep.dir=there", "hydra.sweep.subdir=0"])["name"] == "x"
    plain = composition.composed(["name=x", "train.sizes={0: 16, 2: [8,16]}", "tags=[a]"])
    assert plain["train"]["sizes"] == {"0": 16, "2": [8, 16]}
    assert "hydra" not in plain
    with pytest.raises(
        InputError, match=r"^data_root has \$\{ in its value, which a config reads as a reference; rem"
    ):
        composition.composed(["name=x", r"data_root='\${seed}'"])


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("model.width=3", "++model.width=3"),
        ("metric.f1.average=micro", "++metric.f1.average=micro"),
        *((word, word) for word in ("train.ema=0.5", "seed=1", "model=linear", "+model.width=3", "~model.width")),
    ],
)
def test_keys_of_options_that_only_a_run_names_are_added_in_a_resume_alone(word: str, typed: str) -> None:
    assert composition.typed_words(["resume=not-there", word]) == ["resume=not-there", typed]
    assert composition.typed_words(["+resume=not-there", word])[1] == typed
    for first in ("seed=2", "resume_from=a", "train.resume=a", "name=resume"):
        assert composition.typed_words([first, word]) == [first, word]


def test_an_override_begins_as_no_path_does() -> None:
    overrides = ("a=b", "a.b=c", "++a=", "~a=b", "hydra/launcher=x", "+hydra/x=y", "a@b=c", "a_1=", "1=2")
    assert [word for word in overrides if not commands.OVERRIDE.match(word)] == []
    paths = ("./a=b", "/a=b", "a/b=c", "a-b=c", "a b=c", "=a", "a", "", "~", "../a=b", "*.a=b", "hydra/a/b=c")
    assert [word for word in paths if commands.OVERRIDE.match(word)] == []


def test_the_runs_that_latest_was_take_the_place_of_the_word() -> None:
    words = ["+init_from=latest", "seed=1", "task.teacher=latest"]
    assert commands.with_starts(words, {"init_from": "a b"}) == ["seed=1", "task.teacher=latest", "init_from=a b"]
    starts = {"task.teacher": "a,b", "init_from": "c"}
    assert commands.with_starts(words, starts) == ["seed=1", 'task.teacher="a,b"', "init_from=c"]
    assert commands.with_starts(words, {}) == words


@pytest.mark.parametrize("key", ["strategy.", "hydra.run.", "launcher"])
def test_keys_that_are_not_used_are_left_out_wherever_they_stand_and_others_that_begin_alike_are_not(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = {
        "strategy.": "strategy.sync_batchnorm=true",
        "hydra.run.": "hydra.run.dir=x",
        "launcher": "launcher=spawn",
    }
    alike = ["strategy=ddp", "hydra.job.name=x", "launcher.ranks=2"]
    words = [alike[0], f"++{inside[key]}" * (key != "launcher") or inside[key], *alike[1:]]
    used = composition.without_keys(words, {key}, "it draws")
    assert used == alike
    assert capsys.readouterr().err == f"it draws; ignored: {words[1]}\n"


PATHS = ("resume", "init_from", "task.teacher", "data_root", "output_root", "dataset.path")
PATHS += ("hydra.run.dir", "hydra.sweep.dir")


def test_the_paths_of_these_keys_alone_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b").mkdir()
    for key in (*PATHS, "name", "notes", "dataset.root", "model.path", "hydra.job.name"):
        assert quoted_path(f"{key}=a,b") == (f'{key}="a,b"' if key in PATHS else f"{key}=a,b"), key
        assert quoted_path(f"+{key}=a,b") == f"+{key}=a,b"


FLAGS = {
    "--cfg": "--cfg has no value: --cfg job",
    "--cfg x": "--cfg is 'x', expected job or hydra or all: --cfg job",
    "-c": "--cfg has no value: --cfg job",
    "--experimental-rerun x": "--experimental-rerun: 'x' may have a pickle or settings of Hydra that run code; conti",
}


@pytest.mark.parametrize("line", FLAGS)
def test_flags_of_hydra_are_answered_by_their_long_names(line: str) -> None:
    with pytest.raises(InputError) as refused:
        checked("seed=1", *line.split())
    assert str(refused.value).startswith(FLAGS[line])


def test_the_help_of_an_option_is_that_of_its_own_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "_WORDS", ["python", "mine.py"])
    for word in ("model=../optimizer/sgd", "optimizer/sgd=x", "model=", "loss=resnet50d", "seed=1", "seed"):
        help_page.show_help([word])
        out = capsys.readouterr().out
        assert "its keys" not in out, word
        assert "python mine.py strategy=ddp" in out
    help_page.show_help(["seed=1", "model=torchvision.resnet18", "experiment=photos"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "model=torchvision.resnet18, its keys as model.KEY=VALUE:"
    assert [line for line in lines if line.startswith("experiment=photos sets:")]
    assert lines[-1] == "`python mine.py --help` shows all options and keys."
    assert not {"seed=1", GLOBAL} & {*lines}


def test_completions_have_the_words_of_the_line_for_models_with_tags_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = {"train.py +model=resnet50.a1_": ["+model=resnet50.a1_in1k"], "train.py loss=resnet50.a1_": None}
    lines |= {"train.py model=torchvision.resnet18": None, "train.py model=resnet50": None}
    lines |= {"train.py model=torchvision.resnet18.": ["model=torchvision.resnet18.IMAGENET1K_V1"]}
    for line, completions in lines.items():
        monkeypatch.setenv("COMP_LINE", line)
        assert command_line.answered(["-sc", "query=bash"]) == (completions is not None)
        assert capsys.readouterr().out.split() == (completions or [])
        assert not command_line.answered(["-sc"]), "no shell asks"


WRONG_LINES = {
    "epoch=3": r"^epoch: there is no such key in the config\. Did you mean 'epochs'\?$",
    "model=null": r"a config group takes the name of one of its options: ",
    "epochs=[1": r"^'epochs=\[1' cannot be read, expected KEY=VALUE;",
    "model=zzz": r"^model=zzz: there is no model of that name\.",
    "seed=1,2": r"^seed=1,2 names several values; ",
}


@pytest.mark.parametrize("word", WRONG_LINES)
def test_a_program_gets_the_sentence_of_a_mistake_as_the_command_does(word: str) -> None:
    for compose_line in (composition.composed, lockstep.compose):
        with pytest.raises(InputError, match=WRONG_LINES[word]):
            compose_line(["name=x", word])


def test_a_recipe_keeps_its_keys_for_a_model_that_has_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=photos", "dataset.path=photos", "name=x"]
    assert composition.composed([*words, "model=resnet18"])["model"]["pretrained"] == "auto"
    assert composition.composed(words)["model"]["pretrained"] == "auto"
    assert not capsys.readouterr().err
    linear = composition.composed([*words, "model=linear"])["model"]
    assert "pretrained" not in linear
    note = "experiment=photos sets model.pretrained: not for model=linear\n"
    assert capsys.readouterr().err == note
    typed = composition.composed([*words, "model=linear", "model.pretrained=false"])["model"]
    assert typed["pretrained"] is False, "what is typed is refused, and not left out"
    assert not capsys.readouterr().err
    words = ["experiment=cifar10_resnet34", "name=x", "schedule=constant", "augment=none", "optimizer=adamw"]
    several = composition.composed([*words, "dataset=cifar10"])
    assert (several["optimizer"]["lr"], several["schedule"]["warmup"]) == (0.01, 0)
    assert capsys.readouterr().err.splitlines() == [
        "experiment=cifar10_resnet34 sets optimizer.momentum: not for optimizer=adamw",
        "experiment=cifar10_resnet34 sets schedule.milestones, schedule.gamma: not for schedule=constant",
    ]


@pytest.mark.skipif(IS_13, reason="Hydra 1.3 reads no mode from a line")
def test_a_line_or_its_config_says_whether_it_is_a_sweep(tmp_path: Path) -> None:
    with initialize_config_dir(str(ROOT / "conf")):
        loader = GlobalHydra.instance().config_loader()
        modes = {word: loader.get_mode("config", ["name=x", word]) for word in ("hydra.mode=MULTIRUN", "seed=1")}
    named = {word: getattr(mode, "name", mode) for word, mode in modes.items()}
    assert named == {"hydra.mode=MULTIRUN": "MULTIRUN", "seed=1": None}
    (tmp_path / "config.yaml").write_text("hydra: {mode: MULTIRUN}\n")
    with initialize_config_dir(str(tmp_path)):
        loader = GlobalHydra.instance().config_loader()
        of_file = [loader.get_mode("config", words) for words in ([], ["hydra.mode=RUN"])]
    assert [getattr(mode, "name", mode) for mode in of_file] == ["MULTIRUN", "RUN"]


def test_a_word_that_has_no_counterpart_is_known_in_any_spelling_and_block() -> None:
    sentence = suggest.explain_absent("pin_memory")
    assert sentence == "images for a GPU are in pinned memory always"
    for name in ("trainer.pin-memory", "PinMemory", "a.b.pin_mem", "dataloader-pin-memory"):
        assert suggest.explain_absent(name) == sentence
    assert [name for name in ("pin", "memory", "pin_memory.x", "", "lr") if suggest.explain_absent(name)] == []


def test_the_word_latest_is_no_file_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunDir.at(tmp_path / "first").mark_latest(tmp_path)
    assert (tmp_path / "latest").is_file()
    for key in ("resume", "init_from", "task.teacher"):
        assert parsed(quoted_path(f"{key}=latest")) == "latest"


def test_the_help_has_each_group_of_extensions_and_names_them_all(
    packages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_WORDS", ["lockstep", "train"])
    for package, files in zip(packages, (("debug/fast", "loss/of_mine"), ("paths/here", "debug/slow")), strict=True):
        written(tmp_path / package, {f"conf/{file}.yaml": f"{GLOBAL}\nsteps: 3\n" for file in files})
    extensions.use(packages)
    extension_names = [extension.package for extension in extensions.active()]
    lines = help_page._of_everything()
    start = next(place for place, line in enumerate(lines) if line.startswith("  experiment "))
    behind = lines[start : lines.index("", start)]
    own = [line for line in behind if line.startswith("  ") and not line.startswith("   ")]
    assert own[1:] == ["  debug       fast* slow*", "  paths       here*", f"  * of {', '.join(extension_names)}"]
    (losses,) = [line for line in lines if line.startswith("  loss ")]
    assert losses.endswith(" of_mine*")
    assert lines[lines.index("", start) + 1].startswith("Keys, KEY=VALUE:")


def test_an_installed_extension_that_shares_one_of_its_options_with_the_program_is_left_out_whole(
    packages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(extensions.VARIABLE, raising=False)
    for package, names in zip(packages, (["first"], ["first", "second"]), strict=True):
        written(tmp_path / package, {f"conf/experiment/{name}.yaml": f"{GLOBAL}\n" for name in names})
    monkeypatch.setattr(
        extensions, "_installed", lambda: [Extension(packages[1], "installed", tmp_path / packages[1])]
    )
    extensions.use(packages[:1])
    assert [extension.package for extension in extensions.active()] == packages[:1]
    assert extensions.files("experiment=second") == []
    written(tmp_path / packages[1], {"nets.py": "@option('model')\nclass Own: ...\n"})
    (tmp_path / packages[1] / "conf" / "experiment" / "first.yaml").unlink()
    extensions.active.cache_clear()
    assert {extension.package for extension in extensions.active()} == {*packages}
