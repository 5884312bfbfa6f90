"""Composing the config of a job with Hydra, and its command line, as plain values."""

import dataclasses
import itertools
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config.commands import check_word, key_of, override, parsed, program_words, quoted_path, shell_command
from lockstep.config.history import present_words
from lockstep.config.hydra_policy import as_typed, is_of_hydra, own_hydra
from lockstep.config.hydra_versions import initialize_config_dir, is_list_extend
from lockstep.config.schema import CONF, GROUPS, MANY, RECIPES, Job
from lockstep.core import log
from lockstep.core.errors import UNEXPECTED, InputError
from lockstep.core.fields import leaves
from lockstep.core.safe_read import read_yaml

# A word that chooses an option or sets a key of one, and neither several keys nor a part of a list.
_SETS_OPTION = re.compile(rf"\+*({'|'.join(GROUPS)})(\.[\w.]+)?=(?!\{{|extend_list)")
# The keys of a job that are no groups.
VALUE_KEYS = {field.name for field in dataclasses.fields(Job)} - {*GROUPS}


@dataclass(frozen=True, kw_only=True)
class ConfigFiles:
    """The config files that a command named besides the project's own. A resume needs them to compose again."""

    name: str = "config"
    folder: str = ""  # of `--config-dir`
    searchpath: tuple[str, ...] = ()

    @classmethod
    def current(cls) -> Self:
        hydra = HydraConfig.get()
        added = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
        return cls(
            name=str(hydra.job.config_name),
            folder=added[0].removeprefix("file://") if added else "",
            searchpath=tuple(
                str(override) for override in hydra.overrides.hydra if key_of(override) == "hydra.searchpath"
            ),
        )

    @property
    def are_foreign(self) -> bool:
        """Whether somebody else may have written some, other than those of the project and of extensions."""
        return bool(self.folder or self.searchpath)

    @property
    def words(self) -> tuple[str, ...]:
        name = (f"--config-name={self.name}",) if self.name != ConfigFiles.name else ()
        folder = (f"--config-dir={self.folder}",) if self.folder else ()
        return (*name, *folder, *self.searchpath)


@dataclass(frozen=True, kw_only=True)
class Invocation:
    overrides: tuple[str, ...]  # of the job's keys
    sweep: bool
    folder: Path | None  # the run folder, if the sweep or the command names it
    hydra: str  # Hydra's own config as YAML
    configs: ConfigFiles = ConfigFiles()
    # The words of the command itself, without references; the overrides also have values of files: of a sweep's
    # parameters, and in the place of references.
    own_words: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """All of it, quoted for a shell."""
        return shell_command([*program_words(), *self.configs.words, *self.overrides])

    @classmethod
    def current(cls) -> Self:
        """The invocation of the job that Hydra runs. Raises InputError if it names a folder that it does not use."""
        hydra = HydraConfig.get()
        sweep = hydra.mode == RunMode.MULTIRUN
        check_hydra_overrides(hydra.overrides.hydra, sweep=sweep)
        configs = ConfigFiles.current()
        folder = Path(hydra.sweep.dir, hydra.sweep.subdir) if sweep else Path(hydra.run.dir)
        typed_here = any(key_of(str(word)) == "hydra.run.dir" for word in hydra.overrides.hydra)  # the current folder
        words = sys.argv[1:] if sweep else as_typed(hydra.overrides.task)
        return cls(
            overrides=tuple(words_of_job()),
            sweep=sweep,
            folder=folder.absolute() if sweep or folder != Path() or typed_here else None,
            hydra=OmegaConf.to_yaml(HydraConfig.instance().cfg),
            configs=configs,
            own_words=tuple(word for word in words if "${" not in word),
        )


def words_of_job() -> list[str]:
    """The overrides of the job that Hydra has, with the values of the `${...}` in them: each means the same alone."""
    hydra: Any = HydraConfig.get()
    config, words = OmegaConf.select(hydra, ".."), list[str]()  # the config that Hydra's own is a part of
    for word in as_typed(hydra.overrides.task):
        keys = _keys_set(word) if "${" in word.replace("\\", "") and not word.startswith("~") else []
        values = {key: OmegaConf.select(config, key) for key in keys}
        if not keys or any(map(OmegaConf.is_dict, values.values())):
            words.append(word)
        else:
            sign = word[: -len(word.lstrip("+"))]
            words += [sign + override(key, _plain(value)) for key, value in values.items()]
    return words


def check_hydra_overrides(overrides: Iterable[object], *, sweep: bool) -> None:
    """Refuse an override of Hydra that a command of this kind does not use: for a folder, a sweeper or a launcher."""
    ignored, used = ("run", "sweep") if sweep else ("sweep", "run")
    for text in map(str, overrides):
        key, remedy = key_of(text), f"name a folder with hydra.{used}.dir=FOLDER"
        if not sweep and re.match(r"hydra[./](sweeper|launcher)\b", key):
            remedy = "add -m, or remove it"
        elif not key.startswith(f"hydra.{ignored}."):
            continue
        raise InputError(f"{text} has no effect {'with' if sweep else 'without'} -m; {remedy}")


def jobs_of(words: Sequence[str], loader: Any = None, *, searches: bool = False) -> list[list[str]]:
    """The overrides of each job of a sweep's line, in its order; of an interval, if it `searches`, the two ends.

    Of several words that set a key the last one counts, and all of those that add to it, as in the line of one job.
    With Hydra's `loader`, `glob(...)` is read too. Raises HydraException; InputError for an interval and no search.
    """
    values: list[tuple[str, list[str]]] = []
    for word in OverridesParser.create(config_loader=loader).parse_overrides(list(words)):
        key, value = word.get_key_element(), word.value()
        if not word.is_sweep_override():
            choices = [str(word.input_line)]
        elif not isinstance(value, IntervalSweep):
            choices = [f"{key}={text}" for text in word.sweep_string_iterator()]
        elif searches:
            choices = [f"{key}={end}" for end in (value.start, value.end)]
        else:
            raise InputError(
                f"{word.input_line} is an interval, which only a search draws from; use hydra/sweeper=optuna, or "
                "values with commas"
            )
        adds = is_list_extend(word) or any(text.partition("=")[2].startswith("{") for text in choices)
        values = [*(entry for entry in values if adds or entry[0] != key), ("" if adds else key, choices)]
    return [list(job) for job in itertools.product(*(choices for _, choices in values))]


def of_command(composed: DictConfig) -> dict[str, Any]:
    """The config of the job that Hydra runs, as plain values."""
    return to_dict(composed, HydraConfig.get())


def to_dict(composed: DictConfig, hydra: Any = None) -> dict[str, Any]:
    """A config, without or beside Hydra's own, as plain values. Raises InputError for missing or unresolved ones."""
    # Key by key, because a copy without `hydra` takes longer than all the rest.
    try:
        plain = {str(key): _plain(composed[key]) for key in composed if key != "hydra"}
    except (OmegaConfBaseException, *UNEXPECTED) as error:
        from lockstep.config import messages  # a job without a mistake needs none

        raise messages.translate(error) or messages.unreadable(error) from error
    for key in (field.name for field in dataclasses.fields(Job)):
        if key not in plain:
            raise InputError(f"{key}: this key is required; remove ~{key}")
        if "${" in repr(plain[key]):  # it was escaped; the ranks read the config from a file and would resolve it
            raise InputError(f"{key} has ${{ in its value, which a config reads as a reference; remove it")
    hydra = composed.hydra if "hydra" in composed else hydra
    fitting = plain if hydra is None else _without_keys_of_others(plain, hydra)
    return {key: _with_text_keys(value) for key, value in fitting.items()}


def _without_keys_of_others(plain: dict[str, Any], hydra: Any) -> dict[str, Any]:
    """The values without the keys that a recipe sets for its option of a group, where another option is typed."""
    choices = OmegaConf.select(hydra, "runtime.choices") or {}
    if not choices.get(RECIPES):
        return plain
    fitting, typed = dict(plain), {*map(key_of, as_typed(hydra.overrides.task))}
    for group in [group for group in GROUPS if group in typed - MANY]:
        file, values = CONF / group / f"{choices.get(group)}.yaml", plain[group]
        if isinstance(values, dict) and file.is_file():
            known = {*read_yaml(file), *(key.partition(".")[2] for key in typed)}
            fitting[group] = {key: value for key, value in values.items() if key in known}
            if gone := [f"{group}.{key}" for key in values if key not in known]:
                log.note(f"experiment={choices[RECIPES]} sets {', '.join(gone)}: not for {group}={file.stem}")
    return fitting


def _plain(value: Any) -> Any:
    """A value of a config, without OmegaConf's containers."""
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


def _with_text_keys(value: Any) -> Any:
    """A value with texts as the keys of its dictionaries, as in the files of runs, such as 0 of `train.sizes`."""
    return {str(key): _with_text_keys(item) for key, item in value.items()} if isinstance(value, dict) else value


def recompose(stored: Sequence[str], overrides: Sequence[str], configs: ConfigFiles) -> dict[str, Any]:
    """The config of an earlier command, composed from `configs` with its `stored` overrides, then `overrides`.

    Later ones win; `of_hydra` is then of this composition. Raises InputError for a stored override of Hydra's keys.
    """
    for text in stored:
        check_word(text)
        if is_of_hydra(text):
            raise InputError(f"the run keeps the override {text!r}, expected keys of a job; remove it")
    config = _compose(configs.name, [*configs.searchpath, *stored, *overrides], with_hydra=True)
    HydraConfig.instance().set_config(config)  # values refer to the choices of the run, not of the present command
    return to_dict(config)


def of_hydra() -> str:
    """Hydra's own config of the newest composition, as YAML. Its choices say which options a job has."""
    return OmegaConf.to_yaml(HydraConfig.instance().cfg)


def overrides_that_fit(stored: Sequence[str], overrides: Sequence[str], configs: ConfigFiles) -> list[str]:
    """The `stored` overrides that still apply when `overrides` choose other options of groups.

    Those of keys that only the earlier option has are dropped, and removals of a key that `overrides` set.
    """
    keys = {text: _keys_set(text) for text in (*stored, *overrides)}
    chosen = [text for text in overrides if not keys[text]]
    if not chosen:
        return [*stored]
    choices = [*configs.searchpath, *(text for text in stored if not keys[text])]
    before, after = (
        {key for key, _ in leaves(OmegaConf.to_container(_compose(configs.name, words), resolve=False))}  # type: ignore[arg-type]
        for words in (choices, [*choices, *chosen])
    )
    gone = tuple(f"{key}." for key in before - after)
    removals = {f"~{key_of(text)}" for text in overrides}
    return [
        text
        for text in stored
        if text.partition("=")[0] not in removals and not any(f"{key}.".startswith(gone) for key in keys[text])
    ]


def without_replaced(stored: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The `stored` overrides but for choices and values of options that `overrides` replace, one by one."""
    replacing = {key_of(text) for text in overrides if _SETS_OPTION.match(text)}
    return [text for text in stored if not (_SETS_OPTION.match(text) and key_of(text) in replacing)]


def _keys_set(text: str) -> list[str]:
    """The keys of the values that an override sets or removes; empty if it chooses an option of a group."""
    parsed = OverridesParser.create().parse_override(text)
    key, value = parsed.key_or_group, parsed.value()
    is_value = isinstance(value, dict) or "." in key or key in VALUE_KEYS
    return [name for name, _ in leaves({key: value})] if is_value else []


def _compose(name: str, overrides: list[str], *, with_hydra: bool = False) -> DictConfig:
    try:
        return compose(name, overrides=overrides, return_hydra_config=with_hydra)
    except Exception as error:
        from lockstep.config import messages

        raise messages.translate(error) or messages.translate_before_job(error) or error from error


def typed_words(words: Iterable[str]) -> list[str]:
    """The words of a command line for Hydra, with quoted paths.

    A command with `resume` may set keys of an option that only its run names. Hydra composes the command alone first,
    so it is told to add them; `components` refuses a key that the option does not have.
    """
    quoted = [*map(quoted_path, present_words(words))]
    for word in quoted:
        _check_group(word)
    if "resume" not in map(key_of, quoted):
        return quoted
    return [f"++{word}" if re.match(rf"({'|'.join(GROUPS)})\.[^=]+=", word) else word for word in quoted]


def _check_group(word: str) -> None:
    """Refuse signs, of which Hydra's own remedies do not work, and lists of what are no names, or of too many."""
    key, value = key_of(word), word.partition("=")[2]
    if word[:1] == "+" and key in (*GROUPS, RECIPES):
        raise InputError(f"{word}: the job has this group already, so it is chosen without +: {key}={value}")
    if word[:1] == "~" and key in GROUPS:
        remedy = f"take none of its options with {key}=[]" if key in MANY else f"remove ~{key}"
        raise InputError(f"{word}: the job cannot be without this group; {remedy}")
    names = parsed(word) if key in (*GROUPS, RECIPES) and value[:1] == "[" else None
    if isinstance(names, list) and (key not in (*MANY, RECIPES) or not all(isinstance(name, str) for name in names)):
        from lockstep.config import messages  # a job without a mistake needs none

        raise InputError(messages.no_names(word))


@contextmanager
def composing() -> Iterator[Any]:
    """A context in which configs can be composed without Hydra's `main`, by the loader that it gives."""
    with own_hydra() as hydra, initialize_config_dir(str(CONF)):
        yield hydra.config_loader()


def without_keys(overrides: Iterable[str], keys: Collection[str], who: str) -> list[str]:
    """The overrides without the keys that a command does not use, so that it accepts the command of a run.

    `who` tells what the command does. A key that ends with a dot is all that begin so. Raises InputError for none.
    """
    words, prefixes = list(overrides), tuple(key for key in keys if key.endswith("."))
    if not (ignored := [word for word in words if key_of(word) in keys or key_of(word).startswith(prefixes)]):
        return words
    with composing():
        _compose("config", typed_words(words), with_hydra=True)
    log.note(f"{who}; ignored: {shell_command(ignored)}")
    return [word for word in words if word not in ignored]


@contextmanager
def invoked(overrides: list[str]) -> Iterator[tuple[dict[str, Any], Invocation]]:
    """The plain config of the command line `overrides`, and the command; more can be composed meanwhile."""
    with composing():
        yield _composed(overrides), Invocation.current()


def composed(overrides: list[str]) -> dict[str, Any]:
    with composing():  # not `invoked`: words for a sweep's part of Hydra's config compose, too
        return _composed(overrides)


def _composed(overrides: list[str]) -> dict[str, Any]:
    words = typed_words(overrides)
    for word in words:
        check_word(word)
    config = _compose("config", words, with_hydra=True)
    if config.hydra.mode == RunMode.MULTIRUN:
        raise InputError("hydra.mode=MULTIRUN requests a sweep, expected one job; a sweep is `lockstep train -m ...`")
    HydraConfig.instance().set_config(config)  # the default name of a job refers to Hydra's choices
    return to_dict(config)
