"""The names of timm's models, read from its sources in 0.05 s. Importing timm takes seconds."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

_REGISTERED = re.compile(r"^@register_model\s*\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)


@functools.cache
def timm_models() -> tuple[str, ...]:
    """Every model that timm registers, sorted; empty if timm is not installed."""
    return tuple(sorted(_in_sources(_REGISTERED)))


def tagged_names(architecture: str) -> list[str]:
    """The names of a timm model with a tag of its weights (`resnet50.a1_in1k`), sorted."""
    return sorted(set(_in_sources(re.compile(rf"""['"]({re.escape(architecture)}\.\w+)['"]\s*:"""))))


def _in_sources(pattern: re.Pattern[str]) -> list[str]:
    """The matches of a pattern's group in the sources of timm's models; empty if timm is not installed."""
    spec = importlib.util.find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        return []
    sources = Path(spec.submodule_search_locations[0], "models").glob("*.py")
    return [name for source in sources for name in pattern.findall(source.read_text())]


def is_timm_model(name: str) -> bool:
    """Whether `name` is the name of a timm model, with or without a tag of its weights (`resnet50d.ra2_in1k`)."""
    return name.partition(".")[0] in timm_models()
