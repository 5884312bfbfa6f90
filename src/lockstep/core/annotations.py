"""What a user wrote about a run for people: its tags, its notes and its group."""

from collections.abc import Mapping
from typing import Any

ANNOTATIONS = ("tags", "run_group", "notes")


def annotations_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The `ANNOTATIONS` that a config sets, with all tags in one text."""
    values = {key: config.get(key) for key in ANNOTATIONS}
    texts = {key: ", ".join(map(str, value)) if isinstance(value, list) else value for key, value in values.items()}
    return {key: str(text) for key, text in texts.items() if text}
