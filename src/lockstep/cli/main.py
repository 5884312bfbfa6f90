"""The command `lockstep`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from lockstep.cli.arguments import arguments
from lockstep.runtime import signals

SHELL_COMPLETION = {"-sc", "--shell-completion"}  # Hydra's flag, with which the shell asks for completions


def main() -> None:
    """The console command `lockstep`. What needs torch is imported when a command runs, so that --help is fast."""
    signals.begin(says=signals.STOPPED_EARLY)
    if sys.argv[1:2] == ["train"] or SHELL_COMPLETION & set(sys.argv):
        train()
    else:
        run(arguments())
    from lockstep.runtime import program

    program.finish()


def train() -> None:
    """Train with the words behind `lockstep train`."""
    from lockstep.cli.train import main as train_main

    if sys.argv[1:2] == ["train"]:
        del sys.argv[1]
    # Hydra completes the words behind the program's name, for which it takes the first word of the line.
    os.environ["COMP_LINE"] = os.environ.get("COMP_LINE", "").replace("lockstep train", "lockstep", 1)
    train_main()


def run(given: argparse.Namespace) -> None:
    """Run a command other than `train`."""
    from lockstep.runtime import program

    with program.command_line(), program.bypass_hydra_errors():
        COMMANDS[given.command](given)


def _new(given: argparse.Namespace) -> None:
    from lockstep.cli.new import new

    new(given.project)


def _prove(given: argparse.Namespace) -> None:
    from lockstep.cli.prove import prove

    prove(given.overrides, steps=given.steps, ranks=given.ranks)


def _lr_find(given: argparse.Namespace) -> None:
    from lockstep.cli.lr_find import lr_find

    lr_find(given.overrides, steps=given.steps, low=given.low, high=given.high, out=given.out)


def _pack(given: argparse.Namespace) -> None:
    from lockstep.cli import pack

    if given.check is not None:
        pack.check(given.check)
    else:
        size = 256 if given.size is None else given.size
        pack.pack(given.source, given.target, size=size, skip=given.skip or 0, val_share=given.val_share)


def _evaluate(given: argparse.Namespace) -> None:
    from lockstep.cli.evaluate import evaluate

    evaluate(given.run, given.overrides, split=given.split, device=given.device, out=given.out)


def _predict(given: argparse.Namespace) -> None:
    from lockstep.cli.predict import predict

    predict(given.run, given.files, form=given.format, top=given.top, device=given.device)


def _export(given: argparse.Namespace) -> None:
    from lockstep.cli.export import export_model

    export_model(given.run, given.images, kind=given.format, pixels=given.pixels, out=given.out)


def _demo(given: argparse.Namespace) -> None:
    from lockstep.cli.demo import demo

    demo(given.run, port=given.port, device=given.device)


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "new": _new,
    "prove": _prove,
    "lr-find": _lr_find,
    "pack": _pack,
    "evaluate": _evaluate,
    "predict": _predict,
    "export": _export,
    "demo": _demo,
}
