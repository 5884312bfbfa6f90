"""The flags of commands, and TAB completion of what Hydra cannot complete: tagged weights of models.

After `lockstep -sc install=bash`, the shell calls Hydra's `-sc query=bash` with the line in COMP_LINE.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

import lockstep
from lockstep.config.commands import key_of, program_name
from lockstep.config.options import TORCHVISION, tagged_names
from lockstep.core.errors import InputError, did_you_mean

# argparse's messages, and ours for them: what was typed, what is expected, what to type.
MESSAGES = (
    (r"the following arguments are required: (.*)", "expected {0}: {usage}"),
    (r"argument (\S+): expected (?:one argument|at least one argument)", "{0} has no value: {0} {example}"),
    (r"argument (\S+): invalid int value: '(.*)'", "{0} is '{1}', expected a whole number: {0} {example}"),
    (r"argument (\S+): invalid float value: '(.*)'", "{0} is '{1}', expected a number: {0} {example}"),
    (r"ambiguous option: (\S+) could match (.*)", "{0} may be {1}; write one of them: --config-name NAME"),
    (r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", "{0} is '{1}', expected {2}: {0} {example}"),
)


class Parser(argparse.ArgumentParser):
    """A parser with Lockstep's own error messages."""

    def error(self, message: str) -> NoReturn:
        for pattern, template in MESSAGES:
            if match := re.match(pattern, message):
                flag, *values = (group.replace("', '", " or ").strip("'") for group in match.groups())
                flag = flag.partition("/")[0]  # Hydra's flags have short forms
                needed = [str(item.metavar) for item in self._actions if not item.option_strings and item.required]
                usage = " ".join([self.prog, *needed])
                raise InputError(template.format(flag, *values, usage=usage, example=self._example(flag)))
        raise InputError(f"{self._name}{message}; `{self.prog} --help` shows the arguments")

    def unknown(self, words: list[str]) -> NoReturn:
        """Raise InputError for flags that the command does not have, and words that it does not take."""
        words = [word for word in words if word.startswith("-")] or words
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        hint = did_you_mean(words[0], flags) if words[0].startswith("-") else ""
        hint = hint or f" `{self.prog} --help` shows its arguments."
        raise InputError(f"{self._name}{' '.join(words)} is not a recognized argument.{hint}")

    def takes_value(self, flag: str) -> bool:
        return any(flag in action.option_strings and action.nargs != 0 for action in self._actions)

    @property
    def _name(self) -> str:
        """The command in front of a sentence, which begins with the program."""
        return f"{self.prog.partition(' ')[2]}: ".lstrip(": ")

    def _example(self, flag: str) -> str:
        """A value that a flag takes: its default, its first choice, or what the help calls it; empty for no flag."""
        for action in self._actions:
            if flag in action.option_strings:
                usual = re.search(r"\[([\d.]+)\]$", action.help or "")  # what the help says that it is without one
                known = action.default or (usual and usual[1])
                return str(known or next(iter(action.choices or ()), action.metavar or "VALUE"))
        return ""


def checked_words(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The words for Hydra's parser, overrides first, as 1.3 needs them. Raises InputError for an unknown flag."""
    flags, rest = Parser(parents=[parser], add_help=False).parse_known_args(list(words))
    if flags.experimental_rerun is not None:
        raise InputError(
            f"--experimental-rerun: {flags.experimental_rerun!r} may have a pickle or settings of Hydra "
            "that run code; continue a run with resume=RUN_FOLDER"
        )
    unknown = [word for word in rest if word.startswith("-")]
    if not unknown:
        overrides = [*flags.overrides, *rest]
        return [*overrides, *(word for word in words if word not in overrides)]
    from lockstep.config import suggest  # a line without a mistake needs no guesses

    proposals = []
    for flag in unknown:
        name, sign, value = flag.lstrip("-").partition("=")
        next_word = "".join(words[words.index(flag) + 1 :][:1])
        if not sign and next_word and not next_word.startswith("-") and "=" not in next_word:
            sign, value = " ", next_word
        if sentence := suggest.explain_absent(name):
            raise InputError(f"{flag} is not a flag of this program: {sentence}")
        proposals.append(suggest.suggest_override(name, value if sign else None))
    shown_keys = " ".join(proposals) if all(proposals) else f"`{program_name()} --cfg job` shows them all"
    raise InputError(
        f"{', '.join(unknown)} is not a flag of this program; a key is written without dashes, "
        f"KEY=VALUE{suggest.size_note(shown_keys)}: {shown_keys}"
    )


def shell_asking(words: Sequence[str]) -> str:
    """The shell that asks for completions; empty if none does."""
    return next((word.partition("=")[2] for word in words if word.startswith("query=")), "")


def answered(words: Sequence[str]) -> bool:
    """Print what a line asks for in the place of a run: the help, or completions that Hydra does not have."""
    if not {"-h", "--help"}.isdisjoint(words):
        from lockstep.config import help_page  # few lines ask for it

        help_page.show_help(words)
        return True
    if "--version" in words:  # Hydra would tell its own
        sys.stdout.write(f"lockstep {lockstep.__version__}\n")
        return True
    shell, word = shell_asking(words), os.environ.get("COMP_LINE", "").rpartition(" ")[2]
    key, _, name = word.partition("=")
    is_ours = shell and key_of(word) == "model" and name.count(".") > name.startswith(f"{TORCHVISION}.")
    if is_ours:
        names = tagged_names(name.rpartition(".")[0])
        write([f"{key}={tagged}" for tagged in names if tagged.startswith(name)], shell)
    return bool(is_ours)


def write(completions: Sequence[str], shell: str) -> None:
    sys.stdout.write(("\n" if shell == "fish" else " ").join(completions) + "\n")
