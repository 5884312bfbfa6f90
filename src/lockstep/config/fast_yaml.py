"""Parse config files in C if PyYAML can. In Python, parsing takes a fifth of the time that composing a job takes."""

from __future__ import annotations

import importlib
from typing import Any

import yaml

# Longer texts, in characters, are parsed in Python: in C, tens of thousands of nested brackets overflow the stack.
SHORT = 8192


def install() -> None:
    """Have OmegaConf parse with libyaml. OmegaConf still builds its values from the parsed nodes itself."""
    omegaconf: Any = importlib.import_module("omegaconf._utils")
    slow: Any = omegaconf.get_yaml_loader()
    if not isinstance(slow, type):  # installed already
        return
    fast = type("Loader", (yaml.CSafeLoader, slow), {}) if hasattr(yaml, "CSafeLoader") else slow

    def loader(stream: Any) -> Any:
        text = stream if isinstance(stream, str) else stream.read()
        if text is not stream:
            stream.seek(0)  # parse the stream, not the text, so that an error names the file
        return (fast if len(text) <= SHORT else slow)(stream)

    omegaconf.get_yaml_loader = lambda: loader
