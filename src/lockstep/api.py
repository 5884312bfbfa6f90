"""What a program of somebody else calls: `lockstep.main`, and `lockstep.option` for its classes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence

from lockstep.config.options import option
from lockstep.runtime import signals

__all__ = ["main", "option"]


def main(extensions: Sequence[str] = ()) -> None:
    """Be the command that trains, as `train.py` is, with packages of your own as extensions.

    Args:
        extensions: names of packages, as they are imported, that need not be installed.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return  # a rank that is a fresh interpreter imports the program, which may have no `if __name__ == ...`
    signals.begin(says=signals.STOPPED_EARLY)
    from lockstep.cli.train import main as train_main

    train_main(extensions)
