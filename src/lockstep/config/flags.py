"""Refuses flags that the training command does not have, with what to type instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NoReturn

from lockstep.config import other_words
from lockstep.config.messages import note
from lockstep.config.program_words import program_name
from lockstep.core.errors import InputError

# What Hydra's flags with a value take.
FLAG_VALUES = {
    "--cfg": "job hydra all",
    "--info": "all config defaults defaults-tree plugins searchpath",
    "--package": "optimizer",
    "--config-name": "config",
    "--config-dir": "FOLDER",
    "--config-path": "FOLDER",
}


def check_flags(words: Sequence[str]) -> None:
    """Refuse a flag that Hydra does not have: usually a key in the style of other programs, `--epochs 5`.

    Raises:
        InputError: there is such a flag, or the one that takes Hydra's own settings from a run folder.
    """
    from hydra.main import get_args_parser

    parser = get_args_parser()
    parser.error = _refuse_flag  # type: ignore[method-assign]
    flags, rest = parser.parse_known_args(list(words))
    if flags.experimental_rerun is not None:
        raise InputError(
            f"--experimental-rerun: {flags.experimental_rerun!r} may have a pickle or settings of Hydra "
            "that run code; continue a run with resume=RUN_FOLDER"
        )
    unknown = [word for word in rest if word.startswith("-")]
    if not unknown:
        return
    proposals = []
    for flag in unknown:
        name, sign, value = flag.lstrip("-").partition("=")
        next_word = "".join(words[words.index(flag) + 1 :][:1])
        if not sign and next_word and not next_word.startswith("-") and "=" not in next_word:
            sign, value = " ", next_word
        proposals.append(other_words.ours(name, value if sign else None))
    shown_keys = " ".join(proposals) if all(proposals) else f"`{program_name()} --cfg job` shows them all"
    raise InputError(
        f"{', '.join(unknown)} is no flag of this program; a key is written without dashes, "
        f"KEY=VALUE{note(shown_keys)}: {shown_keys}"
    )


def _refuse_flag(message: str) -> NoReturn:
    """Raise InputError for a flag of Hydra without its value, or with a wrong one."""
    match = re.match(r"argument (--[\w-]+)\S*: (?:invalid choice: ('.*?') )?", message)
    flag = match[1] if match else "a flag"
    problem = f"is {match[2]}" if match and match[2] else "has no value"
    value = FLAG_VALUES.get(flag, "VALUE")
    raise InputError(f"{flag} {problem}, expected {value.replace(' ', ' or ')}: {flag} {value.split()[0]}")
