"""Hides what may be a secret, or name a person, in texts for others: better too much than too little."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.core.errors import escaped
from lockstep.core.fields import nested
from lockstep.data.datasets.decode import BANDS_SUFFIXES
from lockstep.data.datasets.folder import SUFFIXES

SHORTEST_SECRET = 6  # characters; a shorter part of a value would be hidden in many words
_KEY = (
    r"(?:(?:api|access|secret|private|account|signing)[_-]?key|token|secret|passw|passphrase|_pass\b|_pwd|credential|"
    r"cookie|auth(?!ors?\b))[\w.-]{0,99}"
)
_QUOTED = r""""(?:[^"\\\n]|\\.)*"|'(?:[^'\n]|'')*'"""
_PLAIN = r"(?:true|false|null|none)\b"
_IMAGE = "|".join(re.escape(suffix) for suffix in sorted(SUFFIXES | BANDS_SUFFIXES))
_RULES = (
    (r"-----BEGIN [\w ]*PRIVATE KEY-----[\w+/=\\\s]*(-----END [\w ]*-----)?", "***"),
    # KEY=VALUE within quotes; a quoted value; a value after a space, to the end of its line; any other value.
    (rf"""((['"])[^\s'"=]{{0,999}}{_KEY}=)(?:(?!\2).)*""", r"\1***"),
    (rf"""({_KEY}["']?\s*[=:]\s*)(?:{_QUOTED})""", r'\1"***"'),
    (rf"""({_KEY}\\*["']?\s*[=:][ \t]+)(?!["']\*|{_PLAIN})[\\"']*\S[^"\n]*""", r'\1"***"'),
    (rf"""({_KEY}\\*["']?[=:]|(?<![\w-])--[\w-]*{_KEY}[ \t]+|\bbearer[ \t]+)(?!["']|{_PLAIN})\S+""", r"\1***"),
    (r"\b(gh[a-z]_|github_pat_|glpat-|hf_|sk-|wandb_v\d_|xox[a-z]-|AKIA|eyJ)[\w.-]{16,}", "***"),
    (r"""(:/{1,2})[^\s'"]{0,999}@""", r"\1***@"),  # of an address: a token may stand for the user
    # The names of images, which may be names of patients.
    (r"(image \d+, ).{0,999}(, cannot be decoded)", r"\1***\2"),
    (rf"""(?<![^\n'",:=(])[^\n'",:=(]*({_IMAGE})\b""", "***"),
    (r"""(/[\w.-]+){0,8}?/(home\d*|users)/[^/\s'",:;)]+""", "~"),
)


def redacted(text: str, secrets: Sequence[str]) -> str:
    """A text without control characters, `secrets`, home folders, and the names of this user and of images."""
    home = Path.home()
    for secret in secrets:
        text = text.replace(secret, "***")
    if home.name:
        text = re.sub(rf"(?<![\w.-]){re.escape(str(home))}(?![\w-])", "~", text)
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text, flags=re.IGNORECASE)
    if home.name not in ("", "root"):  # which names nobody
        text = re.sub(rf"(?<![a-z0-9]){re.escape(home.name)}(?![a-z0-9])", "~", text, flags=re.IGNORECASE)
    return escaped(text)


def secrets_in(values: Any) -> Iterator[str]:
    """The parts of the texts in plain values that their keys, or the keys of overrides, name as secrets."""
    for keys, value in nested(values):
        name, _, secret = str(value).partition("=")
        if re.search(_KEY, ".".join(keys), re.IGNORECASE):
            secret = str(value)
        elif not re.fullmatch(rf"\S*{_KEY}", name, re.IGNORECASE):
            continue
        # A file may break a value at its spaces, and escape its quotes.
        yield from (part for part in re.split(r"[\s'\"\\]+", secret) if len(part) >= SHORTEST_SECRET)
