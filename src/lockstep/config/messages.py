"""Mistakes of the user as one sentence, from the exceptions of Hydra and OmegaConf."""

import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from lockstep.config import extensions, suggest
from lockstep.config.commands import key_of, override, parsed, program_name, program_words, shell_command
from lockstep.config.options import options_of
from lockstep.config.schema import GROUPS, MANY, RECIPES, Job
from lockstep.core.errors import (
    UNEXPECTED,
    InputError,
    LockstepError,
    StorageError,
    did_you_mean,
    out_of_memory,
    shown,
)
from lockstep.core.native_threads import is_own_process
from lockstep.core.run_dir import LATEST
from lockstep.core.safe_write import FULL


def translate(error: BaseException) -> LockstepError | None:
    """A LockstepError for a user's mistake; None for any other error."""
    if isinstance(error, LockstepError):
        return error
    if isinstance(error, OSError) and error.errno in FULL:
        return StorageError(f"{error.filename or 'a file'} cannot be written ({error.strerror}); free space there")
    if isinstance(error, OverrideParseException):
        group, sign, path = error.override.partition("=")
        if suggestion := suggest.suggest_for_path(*((group, path) if sign else ("", group))):
            expected = f"the name of a {group}" if sign else "KEY=VALUE"
            return InputError(f"{shown(error.override)} is a path, expected {expected}.{suggestion}")
        if group.startswith("-"):  # of a program: a command takes these for flags
            sweep = "; a sweep is lockstep.sweep([...]), or lockstep train -m" * (group in ("-m", "--multirun"))
            return InputError(f"{shown(group)} is a flag, expected KEY=VALUE{sweep}")
        if not sign and (proposal := _joined(error.override)):
            return InputError(
                f"{shown(error.override)} cannot be read, expected KEY=VALUE{suggest.size_note(proposal)}: {proposal}"
            )
        if not sign and group in (field.name for field in dataclasses.fields(Job)):
            value = LATEST if group in ("resume", "init_from") else "VALUE"
            return InputError(f"{group} has no value, expected {group}={value}")
        if sign and (proposal := _quoted(error.override)):
            return InputError(f"{shown(error.override)} cannot be read; quotes reach around one override: {proposal}")
        return InputError(
            f"{shown(error.override)} cannot be read, expected KEY=VALUE; a value with spaces, commas, brackets or "
            f"accents needs quotes that reach the program: \"KEY='a, b'\""
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return InputError(_no_such_file(error.missing_cfg_file, list(error.options or [])))
    # Hydra wraps OmegaConf's errors. A HydraException with another cause is a bug, and its traceback is shown.
    wrapped = (error.__cause__ or error.__context__) if isinstance(error, HydraException) else None
    match = re.match(r"In '([^']+)': \w+ raised while composing", str(error))
    where = f"{match[1]}.yaml: " if match else ""
    for cause in (wrapped, error):
        if isinstance(cause, OmegaConfBaseException):
            return InputError(where + sentence(cause))
    if match := re.match(r"Ambiguous value for argument '(([^=]+)=(.*))'", str(error)):
        is_one = match[2] in {*GROUPS, RECIPES} - {*MANY}
        if Job.__annotations__.get(match[2], "").startswith("str"):
            text = match[3].replace('"', r"\"")
            quoted = shell_command([f'{match[2]}="{text}"'])
            return InputError(f"{match[1]} names several values; a text with a comma has quotes: {quoted}")
        listed = f", and where a list is expected, it is written {shell_command([f'{match[2]}=[{match[3]}]'])}"
        of_shell = f"`{shell_command([*program_words(), '-m', match[1]])}`"
        sweep = of_shell if is_own_process() else f"lockstep.sweep({json.dumps([match[1]])})"
        return InputError(f"{match[1]} names several values; {sweep} runs a sweep over them{listed * (not is_one)}")
    if isinstance(error, HydraException):
        if match := re.search(r"Sweeping over .*'\+*hydra\.sweeper\.params\.(.*)'", str(error)):
            return InputError(f"the values of a sweep are words of its line: -m {match[1]}")
        if match := re.match(r"Could not delete from config\. .*'(.*)'", str(error)):  # in Hydra 1.3 also of a null
            return InputError(f"{match[1]} has no such value that could go; remove ~{match[1]}")
        # Without the remedies of Hydra that need ++.
        return InputError(" ".join(re.split(r"To append to your|Or add a second \+", str(error))[0].split()))
    return out_of_memory(error)


def _joined(word: str) -> str:
    """The override for a key and the value that follows it on the command line after a space; else empty."""
    words = sys.argv[1:]
    if word not in words:
        return ""
    at = words.index(word)
    if at and words[at - 1].endswith("="):  # `epochs= 3`
        word, at = words[at - 1].rstrip("="), at - 1
    value = next((text for text in words[at + 1 : at + 3] if text != "="), "").lstrip("=")  # `= 3`, `=3`
    if not re.fullmatch(r"[\w.+]+", word) or not value or "=" in value or value.startswith("-"):
        return ""
    known = "." in word or word in GROUPS or word in Job.__dataclass_fields__
    if not known:
        return suggest.suggest_override(word, value)
    plain = f"{word}={value}"
    return shell_command([plain if parsed(plain) is not None else override(word, value)])


def _quoted(word: str) -> str:
    """The overrides for a value that spaces cut into words, or for words within one pair of quotes; else empty."""
    parts = word.split()
    if len(parts) > 1 and all("=" in part and parsed(part) is not None for part in parts):
        return shell_command(parts)
    words = sys.argv[1:]
    rest = words[words.index(word) :] if word in words else []
    wholes = (" ".join(rest[:end]) for end in range(2, len(rest) + 1))
    return next((shell_command([whole]) for whole in wholes if parsed(whole) is not None), "")


def translate_before_job(error: BaseException) -> LockstepError | None:
    """`translate` for other errors that Hydra raises before a job: a group without a name, an unwritable folder."""
    if isinstance(error, OSError) and error.filename:
        return InputError(
            f"{error.filename} cannot be written ({error.strerror}); name another folder with output_root=FOLDER, or "
            "with hydra.run.dir=FOLDER"
        )
    if isinstance(error, yaml.YAMLError):
        return InputError(f"a config file is not YAML: {' '.join(str(error).split())}")
    if isinstance(error, ValueError) and "Config group override" in str(error):
        return InputError(_no_option())
    if isinstance(error, UNEXPECTED):
        return unreadable(error)
    return None


def _no_option() -> str:
    """The sentence for a group that is set to something else than names, such as `logger=null`."""
    for word in sys.argv[1:]:
        if key_of(word) in (*GROUPS, RECIPES) and not isinstance(parsed(word), str | list):
            return no_names(word)
    return "a config group takes the name of one of its options: GROUP=NAME, such as model=resnet18"


def no_names(word: str) -> str:
    """The sentence for a word that should choose options of a group."""
    group = key_of(word)
    names = "a list of names of its" if group in MANY else "the name of one of its"
    example = "[]" if group in MANY else next(iter(options_of(group)), "NAME")
    return f"{shown(word)}: a config group takes {names} options: {group}={example}"


def unreadable(error: Exception) -> InputError:
    """The error for a value of the command line or of a config file that cannot be composed."""
    line = " ".join(str(error).split()) or "no reason given"
    line = line if len(line) <= 200 else f"{line[:197]}..."
    return InputError(
        f"the config cannot be composed ({type(error).__name__}: {line}); "
        "look at the values that are not the defaults; HYDRA_FULL_ERROR=1 shows where"
    )


def _no_such_file(path: str, options: list[str]) -> str:
    """The sentence for an option that does not exist, with the option that the user probably meant."""
    whole = path.removesuffix(".yaml")
    group, _, name = whole.rpartition("/")
    first, _, after_group = whole.partition("/")
    if first in (*GROUPS, RECIPES):  # a name with more slashes is a recipe in a subfolder, or a path
        group, name = first, after_group
    if not group:
        return f"there is no config named {name!r}; remove --config-name for the default one"
    more = ", or a model of timm or torchvision" * (group == "model")  # which are too many to list
    options = options or options_of(group)
    listed = options_of(group) if more else options
    listing = f" It is one of {', '.join(listed)}{more}." if listed else ""
    named_elsewhere = suggest.suggest_option(group, name)
    suggestion = (
        suggest.suggest_for_path(group, name)
        or suggest.import_note(group, name)
        or (f" Did you mean {named_elsewhere}?" if named_elsewhere else "")
        or did_you_mean(name, options)
        or did_you_mean(name.rpartition("/")[2], options)
        or listing
        or f" `{program_name()} --help` shows the groups."
    )
    return f"{group}={name}: there is no {group} of that name.{suggestion}{extensions.not_installed()}"


# OmegaConf's messages, and our sentences for them: what was found, what was expected, an override that fits.
_MESSAGES = (
    (
        r"Value '(-?\d+)\.0' of type .*(?:could not be converted to Integer|Union\[.*str.*\]')",
        "is not written as a whole number: {key}={0}",
    ),
    (
        r"Value '(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)' of type .*(?:could not be converted to Integer|Union\[.*str.*\]')",
        "is '{0}', expected a whole number: {key}=10, or in a search {key}=int(interval(1,10))",
    ),
    (r"Value '(.*)' of type .* could not be converted to Integer", "is '{0}', expected a whole number: {key}=10"),
    (r"Value '(.*)' of type .* could not be converted to Float", "is '{0}', expected a number: {key}=0.1"),
    (r"Value '(.*)' is not a valid bool", "is '{0}', expected true or false: {key}=true"),
    (r"Value '(.*)' of type .* '(?:Optional\[)?Union\[.*str.*\]'", "is '{0}', expected a number or a word: {key}=1"),
    (
        r"While dereferencing interpolation '\$\{(\w+)\}': Cannot convert 'DictConfig'",
        "refers to all keys of {0}, expected a text; the name of the option is {key}=${{hydra:runtime.choices.{0}}}",
    ),
    (r"Cannot convert '\w+' to string: '(.*)'", "is '{0}', expected a text: {key}=TEXT"),
    (r"Invalid value '(.*)', expected one of \[((\w+).*)\]", "is '{0}', expected one of {1}: {key}={2}"),
    (r"Unsupported interpolation type (\S+)", "asks for ${{{0}:...}}, which is not allowed; write {key}=VALUE"),
    (r"\w+ \(DictConfig\) does not support deletion", "is a key of each job; remove ~{key}"),
    (
        r"field '.*' is not Optional|Incompatible value 'None'|Value 'None' is incompatible",
        "is null, expected a value: {key}=VALUE",
    ),
    (r"Invalid type assigned: .* value: (.*)", "is {0}, expected keys below it: {key}.KEY=VALUE"),
)


def sentence(error: OmegaConfBaseException, prefix: str = "") -> str:
    """OmegaConf's message as one line: the key (with `prefix`), what was found, what was expected, a remedy."""
    key = f"{prefix}{error.full_key or error.key or ''}"
    if key == "_dummy_":  # Hydra's name for the group that it looks for
        return "a group is a reference, expected the name of an option: GROUP=NAME"
    message = (error.msg or str(error)).splitlines()[0]
    if not key and "nterpolation" in message:  # of a value in the line of a sweep, which has no key there
        key = next((key_of(word) for word in sys.argv[1:] if "${" in word), "")
    if isinstance(error, MissingMandatoryValue):
        return f"{key} has no value; give it one with {key}=VALUE"
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)) and error.parent_node is not None:
        return _no_such_key(key, _paths(OmegaConf.to_container(_root(error.parent_node))))
    if re.match(r"Invalid value assigned: \w+ is not a ListConfig", message):
        value = OmegaConf.create([error.value])[0]  # the value of a node, too
        default = error.child_node
        items = list(default) if isinstance(default, ListConfig) and default and len(default) > 1 else [value]
        example = ",".join(override("", item)[1:] if isinstance(item, str) else str(item) for item in items)
        return f"{key} is {shown(value)}, expected a list: {key}=[{example}]"
    if message.startswith("Cannot merge "):  # a list and a dictionary, of which the config's own is the parent
        if isinstance(error.parent_node, ListConfig):
            return f"{key} is a dictionary, expected a list: {key}=[VALUE]"
        return f"{key} is a list, expected keys below it: {key}.KEY=VALUE"
    for pattern, template in _MESSAGES:
        if match := re.match(pattern, message):
            return f"{key} {template.format(*match.groups(), key=key)}"
    return f"{key}: {message}" if key and not message.startswith(f"{key}:") else message


def _root(node: Any) -> Any:
    """The config that a node is a part of."""
    # One dot is the node itself, and each dot more the one above. A key may have dots in it, so none are counted.
    config = node
    with suppress(ConfigKeyError):  # there is none above, in OmegaConf 2.3
        for dots in itertools.count(2):
            if (above := OmegaConf.select(node, "." * dots)) is None:
                break
            config = above
    return config


def _paths(node: Any, prefix: str = "") -> Iterator[str]:
    """The dotted path of every key of a plain config."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _paths(value, f"{prefix}{key}.")


def _no_such_key(key: str, known: Iterable[str]) -> str:
    """The sentence for a `key` that does not exist, with the key of `known` that the user probably meant."""
    names = [name for name in known if name.startswith("hydra.") == key.startswith("hydra.")]
    names += extensions.own_groups()
    word = next((word for word in sys.argv[1:] if "=" in word and f"{key_of(word)}.".startswith(f"{key}.")), key)
    whole = key if "." in key else key_of(word)  # of a misspelt block, Hydra names no more than the block
    value = word.partition("=")[2] if "=" in word and key_of(word) == whole else None
    if (dotted := key.replace("/", ".")) in names:
        return f"{key}: there is no such key; keys are written with dots: {dotted}={value}"
    hint = suggest.suggest_key(whole, value, names)
    return f"{key}: there is no such key in the config.{hint or f' `{program_name()} --cfg job` shows them all.'}"
