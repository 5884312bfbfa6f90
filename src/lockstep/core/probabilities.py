"""From logits to probabilities."""

from __future__ import annotations

from torch import Tensor

from lockstep.core.model_card import SIGMOID


def probabilities(logits: Tensor, kind: str) -> Tensor:
    """The probabilities of logits (B, classes), in the same shape; `kind` is `softmax` or `sigmoid`."""
    return logits.sigmoid() if kind == SIGMOID else logits.softmax(1)
