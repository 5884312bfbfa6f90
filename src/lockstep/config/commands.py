"""The words of the user's command, and commands in messages, quoted so that the user can paste them into a shell."""

import json
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config.roles import role_of
from lockstep.config.schema import Job
from lockstep.core.errors import InputError, shown
from lockstep.core.fields import SHELL, Role, leaves, personal_values
from lockstep.core.run_dir import LATEST, RunDir, pointed, relative
from lockstep.core.safe_read import UnreadableFile, read_text, read_yaml

# The keys that hold paths of runs and checkpoints, and the keys that hold other folders.
STARTS = ("init_from", "task.teacher")  # of these, `latest` is the run that was the newest when the job began
RUNS = ("resume", *STARTS)
FOLDERS = ("data_root", "output_root", "dataset.path", "hydra.run.dir", "hydra.sweep.dir")
RUN_FOLDERS = ("hydra.run.", "hydra.sweep.")  # how the keys of the folders of runs begin
# What says where a run trains, what it records and how much it may take: of no use where no run is made.
_OF_RUN = {"launcher"} | {key for key in vars(Job()) if role_of(key) in (Role.display, Role.limit, Role.shared)}
OF_RUN = {*_OF_RUN, *(f"{part}." for part in _OF_RUN), *RUN_FOLDERS}
OVERRIDE = re.compile(r"[+~]*(hydra/)?\w[\w.@]*=")  # how one begins; no path does, such as ./a=b
# The characters that have a meaning in an override.
SPECIAL = frozenset("=,[]{}()'\"")
# The words before the overrides of the user's command.
_WORDS = ["lockstep", "train"]


def shell_command(words: Iterable[object]) -> str:
    """Words as a command line, quoted for a shell if necessary."""
    return shlex.join(map(str, words))


def override(key: str, value: object) -> str:
    """The override of `key`: a text, quoted for Hydra (not for a shell) if its grammar requires it; else JSON."""
    if not isinstance(value, str | Path):
        return f"{key}={json.dumps(value)}"
    text = str(value)
    plain = f"{key}={text}"
    if not SPECIAL.intersection(text) and parsed(plain) == text:  # to parse it takes 10 ms in a new process
        return plain
    from hydra.core.override_parser.types import Quote, QuotedString  # takes 0.1 s, and `lockstep --help` needs none

    quote = Quote.single if '"' in text else Quote.double  # a shell's own quotes are usually single ones
    return f"{key}={QuotedString(text, quote).with_quotes()}"


def quoted_path(word: str) -> str:
    """A word of the command line, quoted for Hydra if it sets a path that exists, or a path that begins with `~`.

    The runs of a sweep have `=` and `,` in their names, and a shell completes these names without quotes. Shells do
    not expand the `~` of `dataset.path=~/photos`, and Hydra cannot parse it. `outputs/latest` becomes the run that it
    names now: it names another one when this run is resumed.
    """
    key, _, path = word.partition("=")
    if key not in (*RUNS, *FOLDERS) or not path:
        return word
    if key in RUNS and path != LATEST and Path(path).is_file():
        path = str(pointed(Path(path), Path("outputs"), key))
        word = f"{key}={path}"
    return override(key, path) if path.startswith("~/") or Path(path).exists() else word


def typed_strategy(overrides: Iterable[str]) -> str:
    """The name of the strategy in a command line; empty without one."""
    names = [word.partition("=")[2] for word in overrides if key_of(word) == "strategy"]
    return names[-1] if names else ""


def latest_starts(values: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The run that `latest` names in the `STARTS` of a config, by key.

    A job whose config was `stored` keeps its run. Any other takes the newest one of the config's `output_root`; if
    that is a run of the same command, what it took. Raises InputError if there is none.
    """
    at, taken = dict(leaves(values)), dict(leaves(stored or {}))
    if not (keys := [key for key in STARTS if at.get(key) == LATEST]):
        return {}
    if not all(map(taken.get, keys)):
        newest = pointed(Path(LATEST), Path(str(at["output_root"])).expanduser(), f"{keys[0]}={LATEST}")
        taken = dict.fromkeys(keys, str(newest))
        with suppress(UnreadableFile):
            of_newest = dict(leaves(read_yaml(RunDir(newest).composed)))
            taken |= of_newest if {**at, **dict.fromkeys(keys)} == {**of_newest, **dict.fromkeys(keys)} else {}
    return {key: str(taken[key]) for key in keys}


def with_starts(words: Iterable[str], starts: Mapping[str, str]) -> list[str]:
    """The overrides with the runs that `latest_starts` has found."""
    others = [word for word in words if key_of(word) not in starts]
    return [*others, *(override(key, path) for key, path in starts.items())]


def parsed(word: str) -> object:
    """The value that Hydra reads from an override; None if Hydra cannot parse it or reads several values."""
    from hydra.core.override_parser.overrides_parser import OverridesParser  # as above
    from hydra.errors import HydraException

    with suppress(HydraException):
        read = OverridesParser.create().parse_override(word)
        return None if read.is_sweep_override() else read.value()
    return None


def started_as(program: str) -> None:
    """Set the command from `sys.argv[0]` of this process: `python train.py` or `lockstep train`."""
    name = Path(program).name
    if name.endswith(".py") and name != "__main__.py":
        _WORDS[:] = ["python", name]


def program_words() -> list[str]:
    """The two words before the overrides of the user's command."""
    return [*_WORDS]


def program_name() -> str:
    return " ".join(_WORDS)


def command_of_program() -> list[str]:
    """The words that start this program in a fresh interpreter."""
    if Path(sys.argv[0]).suffix == ".py" and Path(sys.argv[0]).name != "__main__.py":
        return [sys.executable, str(Path(sys.argv[0]).absolute())]
    return [sys.executable, "-m", "lockstep", "train"]


def key_of(override: str) -> str:
    """The key or group of an override: `epochs` for `++epochs=3`."""
    return override.lstrip("+~").partition("=")[0].strip()


def refusal(*values: tuple[str, str, object, object]) -> str:
    """The sentence about values that only the user's own line may give: `fields.personal_values`."""
    is_shell = any(role == SHELL for _, role, _, _ in values)
    what = "lines of shell come" if is_shell else "where a run writes and what it sends come"
    typed = [override(key, value) for key, _, value, _ in values]
    again = [*["launcher=slurm"] * is_shell, *(override(key, default) for key, _, _, default in values)]
    return (
        f"{' and '.join(f'{key} is {shown(value)}' for key, _, value, _ in values)} in a config file or in the run "
        f"folder, but {what} from the command line alone; type {shell_command(typed)}, or remove it with "
        f"{shell_command(again)}"
    )


def check_word(text: str) -> None:
    """Refuse a word of the command line that would move what a job writes, or that no file can have."""
    value = text.partition("=")[2]
    if "=" in text and key_of(text) in ("hydra", "hydra.output_subdir"):
        raise InputError(f"{shown(text)}: a run folder has its own .hydra, and Hydra writes none; remove it")
    if "=" in text and key_of(text) in ("hydra.job", "hydra.job.chdir") and value.strip().lower() != "false":
        raise InputError(f"{shown(text)}: a job stays in the folder of its command; remove hydra.job.chdir")
    if not text.isascii() and text.encode(errors="replace").decode() != text:
        raise InputError(f"{shown(text)} is not valid Unicode; write it in UTF-8")


def repeated_words(command: str, keys: Collection[str]) -> list[str]:
    """The words of a run's command that a resume must repeat: the program, the config files, and some `keys`."""
    words, files = shlex.split(command), ("--config-", "hydra.searchpath=")
    return words[:2] + [word for word in words if word.startswith(files) or key_of(word) in keys]


def resume_command(run_dir: RunDir, job: Job, *overrides: str) -> str:
    """What the user types to resume a run; a call of `lockstep.train` if the run has objects of a program."""
    from lockstep.config.extensions import arguments_of  # imported late: to start a command needs it nowhere

    if objects := arguments_of(vars(job)):
        words = [override("resume", relative(run_dir.path)), *overrides]
        return f"lockstep.train({json.dumps(words)}, {', '.join(objects)})"
    words, keys = program_words(), {key for key, *_ in personal_values(job)} - {"output_root"}
    with suppress(UnreadableFile):
        words = repeated_words(read_text(run_dir.command), keys)
    return shell_command([*words, override("resume", relative(run_dir.path)), *overrides])
