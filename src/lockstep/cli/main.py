"""The command `lockstep`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable

from lockstep.cli.arguments import arguments
from lockstep.runtime import signals

SHELL_COMPLETION = {"-sc", "--shell-completion"}  # Hydra's flag, with which the shell asks for completions


def main() -> None:
    """The console command `lockstep`. Imports torch only when a command runs, because --help must be fast."""
    signals.begin(says=signals.STOPPED_EARLY)
    if SHELL_COMPLETION & set(sys.argv):
        complete()
    elif sys.argv[1:2] == ["train"]:
        train()
    else:
        run(arguments())
    from lockstep.runtime import program

    program.finish()


def train() -> None:
    """Train with the words after `lockstep train`."""
    from lockstep.cli.train import main as train_main

    if sys.argv[1:2] == ["train"]:
        del sys.argv[1]
    # Hydra takes the first word of the line as the program, and completes the words after it: remove `train`.
    os.environ["COMP_LINE"] = re.sub(r"^(\S*lockstep)\s+train\b", r"\1", os.environ.get("COMP_LINE", ""), count=1)
    train_main()


def complete() -> None:
    """Print the completions of the last word of the shell's line."""
    line = os.environ.get("COMP_LINE", "")
    query = next((word for word in sys.argv if word.startswith("query=")), "")
    if not query or re.match(r"\S*lockstep\s+train\s", line):
        train()
        return
    from lockstep.config.completion import command_words

    separator = "\n" if query == "query=fish" else " "
    sys.stdout.write(separator.join(command_words(["train", *COMMANDS], line)) + "\n")


def run(options: argparse.Namespace) -> None:
    """Run a command other than `train`."""
    from lockstep.runtime import program

    with program.command_line(), program.bypass_hydra_errors():
        COMMANDS[options.command](options)


def _new(options: argparse.Namespace) -> None:
    from lockstep.cli.new import new

    new(options.project)


def _prove(options: argparse.Namespace) -> None:
    from lockstep.cli.prove import prove

    prove(options.overrides, steps=options.steps, ranks=options.ranks)


def _lr_find(options: argparse.Namespace) -> None:
    from lockstep.cli.lr_find import lr_find

    lr_find(options.overrides, steps=options.steps, low=options.low, high=options.high, out=options.out)


def _pack(options: argparse.Namespace) -> None:
    from lockstep.cli import pack

    if options.check is not None:
        pack.check(options.check)
    else:
        size = 256 if options.size is None else options.size
        pack.pack(options.source, options.target, size=size, skip=options.skip or 0, val_share=options.val_share)


def _evaluate(options: argparse.Namespace) -> None:
    from lockstep.cli.evaluate import evaluate

    evaluate(options.run, options.overrides, split=options.split, device=options.device, out=options.out)


def _predict(options: argparse.Namespace) -> None:
    from lockstep.cli.predict import predict

    predict(options.run, options.files, form=options.format, top=options.top, device=options.device)


def _export(options: argparse.Namespace) -> None:
    from lockstep.cli.export import export_model

    export_model(options.run, options.images, kind=options.format, pixels=options.pixels, out=options.out)


def _demo(options: argparse.Namespace) -> None:
    from lockstep.cli.demo import demo

    demo(options.run, port=options.port, device=options.device)


def _clean(options: argparse.Namespace) -> None:
    from lockstep.cli.clean import clean

    clean(options.folders, keep=options.keep, everything=options.all, yes=options.yes)


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "new": _new,
    "prove": _prove,
    "lr-find": _lr_find,
    "pack": _pack,
    "evaluate": _evaluate,
    "predict": _predict,
    "export": _export,
    "demo": _demo,
    "clean": _clean,
}
