"""The arguments of the commands: words that were meant for a flag, and keys that a command sets itself."""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from lockstep.api import compose
from lockstep.cli.arguments import ONE_PROCESS, arguments, parsers
from lockstep.config.commands import OF_RUN
from lockstep.config.composition import without_keys
from lockstep.core.errors import InputError, LockstepError, StorageError
from lockstep.diagnostics.doctor import LOOK_S
from lockstep.diagnostics.ladder import OF_RUNGS
from lockstep.diagnostics.lr_find import OF_TEST, lr_find
from lockstep.diagnostics.prove import OF_RUNS
from lockstep.inference.export import LARGEST_SHARE, TOLERANCE
from lockstep.job.resume import refuse_resume

# A command that trained a run, with a key of each kind that says where and how.
OF_MACHINES = ("logger=wandb", "launcher=slurm", "launcher.ranks=2", "sweep.halving=3")
TRAINED = ["epochs=3", "schedule=step", "schedule.warmup=3", *OF_MACHINES]
OF_JOBS: dict[str, Callable[[list[str]], object]] = {
    "lr-find": lambda words: lr_find(words, steps=2, low=1e-3, high=1.0, out=None),
    "lockstep.compose": compose,
}


USED = [({*OF_RUN, *OF_TEST}, []), (OF_RUN, TRAINED[:3]), (OF_RUNS, TRAINED[1:3]), (OF_RUNGS, TRAINED[:3])]


@pytest.mark.parametrize(("keys", "used"), USED)
def test_a_command_takes_the_line_that_trained_without_the_keys_that_it_does_not_use(
    keys: Collection[str], used: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert without_keys(["model=linear", *TRAINED], keys, "it draws") == ["model=linear", *used]
    ignored = [word for word in TRAINED if word not in used]
    assert capsys.readouterr().err == f"it draws; ignored: {' '.join(ignored)}\n"
    assert without_keys(["model=linear"], keys, "it draws") == ["model=linear"]
    assert not capsys.readouterr().err
    with pytest.raises(InputError, match=r"Did you mean .launcher\.ranks"):
        without_keys(["launcher=spawn", "launcher.rank=2"], keys, "it draws")


def test_where_a_run_trains_what_it_records_and_what_it_may_take_are_of_a_run_alone() -> None:
    keys = ("launcher", "logger", "checkpoint", "telemetry", "tags", "notes", "run_group", "sweep", "cost", "budget")
    assert {*keys, *(f"{key}." for key in keys), "hydra.run.", "hydra.sweep."} == OF_RUN


@pytest.mark.parametrize("command", ["evaluate", "predict", "export", "demo", "runs", "compare", "report", "watch"])
def test_a_command_that_takes_no_job_ignores_the_line_that_trained(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, "RUN", *["a.png"] * (command == "predict")]
    words += ["--by", "epochs=3"] if command == "compare" else []
    monkeypatch.setattr(sys, "argv", ["lockstep", *words])
    expected = arguments()
    monkeypatch.setattr(sys, "argv", ["lockstep", *words[:2], *TRAINED, *words[2:], "model=linear"])
    used = [word for word in TRAINED if command == "evaluate" and word.startswith("launcher")]
    vars(expected).update({"overrides": used} if used else {})
    assert arguments() == expected
    ignored = [word for word in TRAINED if word not in used]
    assert f"ignored: {' '.join(ignored)} model=linear" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["lockstep", *words, "epohcs=3"])
    with pytest.raises(InputError, match=r"Did you mean .*epochs"):
        arguments()


@pytest.mark.parametrize("command", ["evaluate", "predict", "export", "demo", "runs", "compare", "report", "watch"])
@pytest.mark.parametrize(("roots", "folder"), [((), "."), (("a/b",), "a/b"), (("b", "a", "/tmp/c/"), "/tmp/c")])
def test_latest_is_of_the_last_output_root_that_is_typed(
    command: str, roots: tuple[str, ...], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = [f"output_root={root}" for root in roots]
    monkeypatch.setattr(sys, "argv", ["lockstep", command, *typed, "latest", *["a.png"] * (command == "predict")])
    values = vars(arguments())
    (run,) = {str(values[name]) for name in ("path", "folder", "paths") if name in values}
    assert run.strip("[]'") == str(Path(folder, "latest"))


@pytest.mark.parametrize("command", ["evaluate", "predict", "export", "demo", "runs", "compare", "report", "watch"])
def test_a_file_or_folder_that_exists_is_no_override_whatever_its_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "epochs=3").mkdir()
    monkeypatch.setattr(sys, "argv", ["lockstep", command, "epochs=3", *["a.png"] * (command == "predict")])
    assert "epochs=3" in repr(vars(arguments()))
    assert not capsys.readouterr().err


def test_an_evaluation_takes_the_data_and_the_ranks_of_the_line_that_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["lockstep", "evaluate", "RUN", "dataset=fake", "epochs=3", "launcher.ranks=2", "device=cpu"]
    )
    assert arguments().overrides == ["dataset=fake", "launcher.ranks=2", "device=cpu"]


def test_a_run_to_resume_is_not_left_out_where_it_says_the_job() -> None:
    with pytest.raises(InputError, match=r"^resume=latest: it trains; remove it, and type the overrides"):
        refuse_resume(["seed=1", "resume=latest"], "it trains")
    for word in ("+resume=latest", "++resume=latest", "~resume"):
        with pytest.raises(InputError, match=rf"^{re.escape(word)}: it trains; remove it"):
            refuse_resume(["seed=1", word], "it trains")
    refuse_resume(["name=resume", "notes=resume=latest"], "it trains")


def test_words_that_are_left_out_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["dataset.path=no/such", "dataset=folder", "epochs=2", f"hydra.run.dir={tmp_path}", "schedule=step"]
    for run in (OF_JOBS["lr-find"], OF_JOBS["lockstep.compose"]):
        with pytest.raises(InputError, match="no/such"):  # and not of the other words
            run(line)
    assert f"ignored: epochs=2 hydra.run.dir={tmp_path} schedule=step" in capsys.readouterr().err


@pytest.mark.parametrize("command", [*ONE_PROCESS, "evaluate"])
def test_a_command_that_starts_ranks_is_refused_as_a_rank(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", command, *["run"] * (command == "evaluate")])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    ranks = ", with launcher.ranks=2" * (command == "evaluate")
    sentence = f"lockstep {command} is one process on each machine; start it without torchrun or srun -n{ranks}"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        arguments()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert arguments().command == command


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["compare"], ["--json"]),
        (["compare"], ["--by", "epochs"]),
        (["predict", "run"], ["--csv"]),
        (["clean"], ["--all"]),
    ],
)
def test_paths_of_any_number_stand_before_and_behind_options(
    words: list[str], option: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    for line in ([*words, "a", "b", *option], [*words, "a", *option, "b"], [*words, *option, "a", "b"]):
        monkeypatch.setattr(sys, "argv", ["lockstep", *line])
        read.append(vars(arguments()))
    assert read == read[:1] * 3
    assert ["a", "b"] in read[0].values()


# What a command is called with if its line has no more than it needs.
USUAL: dict[str, dict[str, object]] = {
    "train": {},
    "new mine": {"project": "mine"},
    "evaluate run": {"path": "run", "device": None, "overrides": [], "split": "val", "out": None, "form": "table"},
    "predict run a.png": {
        "path": "run",
        "device": None,
        "files": ["a.png"],
        "form": "table",
        "top": None,
        "threshold": None,
        "out": None,
    },
    "export run": {"path": "run", "images": [], "kind": "onnx", "pixels": "uint8", "out": None},
    "demo run": {"path": "run", "device": None, "port": 8000},
    "runs": {"folder": "outputs", "sort": "when", "columns": [], "filters": [], "form": "table"},
    "compare a": {"paths": ["a"], "by": [], "sort": None, "columns": [], "form": "table"},
    "report a": {"path": "a", "bundle": False},
    "watch": {"path": "outputs", "port": 8000},
    "clean": {"folders": ["outputs"], "yes": False, "keep": 1, "everything": False, "form": "table"},
    "doctor": {"overrides": [], "multirun": False, "everything": False, "form": "table"},
    "show": {"overrides": [], "images": 6, "epochs": 6, "out": None},
    "lr-find": {"overrides": [], "steps": 100, "low": 1e-6, "high": 10.0, "out": None, "form": "table"},
    "prove": {"overrides": [], "steps": 20, "ranks": None, "everything": False, "form": "table"},
    "ladder": {"overrides": [], "ranks": None, "repeats": 3, "only": None, "scripts": [], "form": "table"},
    "pack a b": {"words": ["a", "b"], "decode_size": None, "skip": None, "val_share": None, "check": None},
}
# Lines, and what is other than usual.
TYPED: dict[str, dict[str, object]] = {
    "evaluate run --split test --out a --json --device cpu": {
        "split": "test",
        "out": "a",
        "form": "json",
        "device": "cpu",
    },
    "evaluate run --split train --device cuda": {"split": "train", "device": "cuda"},
    "predict run a.png --top 3 --threshold 0.25 --csv": {"top": 3, "threshold": 0.25, "form": "csv"},
    **{f"export run --to {kind}": {"kind": kind} for kind in ("onnx", "torch", "timm")},
    "export run --format torch --pixels float": {"kind": "torch", "pixels": "float"},
    "demo run --port 0": {"port": 0},
    "watch --port 1": {"port": 1},
    "runs --sort score --columns a/b,c --filter a=b --filter c>3 --latex": {
        "sort": "score",
        "columns": ["a/b", "c"],
        "filters": ["a=b", "c>3"],
        "form": "latex",
    },
    "compare a --by lr --by model --markdown": {"by": ["lr", "model"], "form": "markdown"},
    "report a --bundle": {"bundle": True},
    "clean --yes --keep 3 --all --json": {"yes": True, "keep": 3, "everything": True, "form": "json"},
    "doctor -m --all --json": {"multirun": True, "everything": True, "form": "json"},
    "doctor --multirun": {"multirun": True},
    "show --images 2 --epochs 3 --out x.png": {"images": 2, "epochs": 3, "out": "x.png"},
    "lr-find --steps 7 --low 1e-3 --high 2 --json": {"steps": 7, "low": 1e-3, "high": 2.0, "form": "json"},
    "prove --steps 3 --ranks 2,3 --all": {"steps": 3, "ranks": "2,3", "everything": True},
    "ladder --ranks 2 --repeat 1 --only ddp --script a.py --script b.py --csv": {
        "ranks": 2,
        "repeats": 1,
        "only": "ddp",
        "scripts": ["a.py", "b.py"],
        "form": "csv",
    },
    "pack a b --size 32 --skip 1 --val-share 0.1": {"decode_size": "32", "skip": "1", "val_share": "0.1"},
    "pack a b --check c": {"check": "c"},
}
LINES = [*((line, values) for line, values in USUAL.items()), *TYPED.items()]


@pytest.mark.parametrize(("line", "values"), LINES, ids=[line for line, _ in LINES])
def test_a_line_without_flags_means_what_is_usual(
    line: str, values: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", *line.split()])
    usual = next(of for name, of in USUAL.items() if line.startswith(name))
    read = {key: value for key, value in vars(arguments()).items() if key != "rest"}
    assert read == {"command": line.split()[0], **usual, **values}
    assert {name.split()[0] for name in USUAL} == {*parsers()[1]}


def test_a_command_has_one_form_of_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", "runs", "--json", "--csv"])
    with pytest.raises(InputError, match="--csv: not allowed with argument --json"):
        arguments()


WRONG = {
    "-x": "expected a command, such as lockstep train; `lockstep --help` lists them",
    "evalute run": "there is no command 'evalute'. Did you mean 'lockstep evaluate'?",
    "zzz": "there is no command 'zzz'. They are train, evaluate, predict, export, demo, runs, compare, report, ",
    "seed=1 'name=a b'": "seed=1 is for training, expected a command before it: lockstep train seed=1 'name=a b'",
    "evaluate": "expected RUN: lockstep evaluate RUN",
    "--version=3 runs": "argument --version: ignored explicit argument '3'; `lockstep --help` shows the arguments",
    "predict": "expected RUN, FILE: lockstep predict RUN FILE",
    "predict run a --top": "--top has no value: --top 3",
    "predict run a --top x": "--top is 'x', expected a whole number: --top 3",
    "predict run a --threshold x": "--threshold is 'x', expected a number: --threshold 0.5",
    "lr-find --low x": "--low is 'x', expected a number: --low 1e-06",
    "evaluate run --split x": "--split is 'x', expected val or train or test: --split val",
    "evaluate run --device x": "--device is 'x', expected cpu or cuda: --device cpu",
    "runs --filter": "--filter has no value: --filter CONDITION",
    "report a b c": "report: b c is not a recognized argument. `lockstep report --help` shows its arguments.",
    "report a b -x --bundel": "report: -x --bundel is not a recognized argument. `lockstep report --help` shows its",
    "report a --bundel b": "report: --bundel is not a recognized argument. Did you mean '--bundle'?",
    "clean a --kep 3": "clean: --kep is not a recognized argument. Did you mean '--keep', '--help'?",
    "clean a --yes b --kep 3": "clean: --kep is not a recognized argument. Did you mean '--keep', '--help'?",
    "compare a --json b c -x": "compare: -x is not a recognized argument. `lockstep compare --help` shows its",
    "evaluate run --out": "--out has no value: --out FOLDER",
    "compare a --sort": "--sort has no value: --sort COLUMN",
    "prove --ranks": "--ranks has no value: --ranks N,N",
    "pack a b --size": "--size has no value: --size 256",
    "demo run --port x": "--port is 'x', expected a whole number: --port 8000",
    "runs --json --csv": (
        "runs: argument --csv: not allowed with argument --json; `lockstep runs --help` shows the arguments"
    ),
    "prove --steps": "--steps has no value: --steps 20",
    "show --images 1.5": "--images is '1.5', expected a whole number: --images 6",
    "export run --to x": "--to is 'x', expected onnx or torch or timm: --to onnx",
    "export run --format": "--to has no value: --to onnx",
    "new": "expected PROJECT: lockstep new PROJECT",
    "export": "expected RUN: lockstep export RUN",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_of_a_command_is_answered_with_what_to_type(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", *shlex.split(line)])
    with pytest.raises(InputError) as refused:
        arguments()
    assert str(refused.value).startswith(WRONG[line])
    assert str(refused.value) == WRONG[line] or not WRONG[line].startswith("expected "), "all that is needed, alone"


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"], ["--version"]])
def test_the_command_alone_shows_its_help(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", *words])
    with pytest.raises(SystemExit) as left:
        arguments()
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("lockstep " if words == ["--version"] else "usage: lockstep ")


# What stands in brackets behind the help of an argument, where no line shows it: the command decides it later.
DECIDED_LATER = {
    *("a GPU if there is one", "the run or sweep, or the current folder", "the run's evaluation split"),
    *("next to the weights", "score, best first", f"stop after {LOOK_S:g} s", "show.png in the current folder"),
    *("lr-find.svg in output_root", "2,3,4, or up to the number of GPUs", "MNIST", "GPUs, or 2", "all"),
}
LATER = {"--top": "3", "--threshold": "0.5", "--size": "256", "--skip": "0"}


@pytest.mark.parametrize("command", [name for name in USUAL if name != "train"])
def test_the_help_of_an_argument_ends_with_what_it_is_without_one(command: str) -> None:
    for action in parsers()[1][command.split()[0]]._actions:
        usual = re.search(r"\[([^\]]+)\]$", action.help or "")
        if usual is None or usual[1] in DECIDED_LATER:
            continue
        (default,) = action.default if isinstance(action.default, list) else [action.default]
        if default is None:
            assert LATER[action.option_strings[-1]] == usual[1]
        else:
            assert type(default)(usual[1]) == default, action


FORMS_OF = {
    **dict.fromkeys(("evaluate", "clean", "doctor", "lr-find", "prove"), ("json",)),
    "predict": ("csv", "json"),
    "ladder": ("csv", "json"),
    **dict.fromkeys(("runs", "compare"), ("csv", "json", "latex", "markdown")),
}


@pytest.mark.parametrize("line", USUAL)
def test_a_command_has_these_forms_of_output_besides_a_table(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = FORMS_OF.get(line.split()[0], ())
    for form in ("csv", "json", "latex", "markdown"):
        monkeypatch.setattr(sys, "argv", ["lockstep", *line.split(), f"--{form}"])
        if form in forms:
            assert arguments().form == form
        else:
            with pytest.raises(InputError, match=f"--{form} is not a recognized argument"):
                arguments()


@pytest.mark.parametrize("command", [*ONE_PROCESS, "pack"])
def test_a_command_that_takes_a_job_has_every_word_of_it_whatever_it_uses(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["seed=1", "output_root=x", *TRAINED, "latest"]
    monkeypatch.setattr(sys, "argv", ["lockstep", command, *words])
    values = vars(arguments())
    assert values["words" if command == "pack" else "overrides"] == words
    assert not capsys.readouterr().err


@pytest.mark.parametrize("line", [line for line in USUAL if line.split()[0] not in (*ONE_PROCESS, "evaluate")])
def test_a_command_of_one_process_may_be_started_in_a_rank(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["lockstep", *line.split()])
    assert arguments().command == line.split()[0]


def test_an_evaluation_takes_data_root_and_keys_below_the_data_and_leaves_out_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data_root=there", "dataset.limit=3", "seed=1", "output_root=there", "task=multilabel"]
    monkeypatch.setattr(sys, "argv", ["lockstep", "evaluate", "RUN", *words])
    assert arguments().overrides == words[:2]
    settings = "settings of data and ranks alone"
    sentence = f"lockstep evaluate trains nothing, so it takes {settings}; ignored: {' '.join(words[2:])}\n"
    assert capsys.readouterr().err == sentence


@pytest.mark.parametrize("line", ["runs RUN", "runs --json", "demo RUN", "compare RUN --json"])
def test_what_a_command_without_a_job_ignores_is_said_also_of_an_output_root_that_nothing_needs(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", *line.split(), "epochs=3", "output_root=there"])
    assert not {"epochs=3", "output_root=there"} & {*map(str, vars(arguments()).values())}
    sentence = f"lockstep {line.split()[0]} trains nothing, so it takes no settings"
    assert capsys.readouterr().err == f"{sentence}; ignored: epochs=3 output_root=there\n"


def numbers_in(command: str, pattern: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, parsers()[1][command].description or "")]


def test_the_descriptions_of_commands_have_the_numbers_that_the_commands_have() -> None:
    assert numbers_in("export", r"\de-\d") == [TOLERANCE, LARGEST_SHARE]
    code = r"exit code is (\d+)|, (\d+) if"
    codes = {"pack": [InputError, StorageError], "predict": [InputError], "runs": [InputError]}
    codes |= {"doctor": [InputError], "prove": [None, LockstepError, InputError]}
    for command, errors in codes.items():
        numbers = [int("".join(pair)) for pair in re.findall(code, parsers()[1][command].description or "")]
        assert numbers == [0 if error is None else error.exit_code for error in errors], command


def test_every_argument_of_every_command_has_a_line_in_its_help() -> None:
    _, commands = parsers()
    silent = [
        f"{name} {action.dest}"
        for name, command in commands.items()
        for action in command._actions
        if not action.help or action.help == argparse.SUPPRESS
    ]
    assert silent == []
