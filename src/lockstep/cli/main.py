"""The command `lockstep`."""

from __future__ import annotations

import argparse
import os
import sys

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


def arguments() -> argparse.Namespace:
    """The arguments of the other commands; a mistake in them ends the program with code 2."""
    parser = argparse.ArgumentParser(prog="lockstep", description="Train image classifiers: `lockstep train --help`.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", help="train a job or a sweep: what train.py does in a checkout")
    new = commands.add_parser("new", help="write a small project of your own: a model, a data set, a test")
    new.add_argument("project", metavar="PROJECT", help="the folder to make, named like its package")
    prove = commands.add_parser(
        "prove",
        help="show on this machine that a config is the same run under every strategy and world size",
        description="Train a config for a few steps under every strategy and on every number of ranks that this "
        "machine allows, kill one run and resume it, and compare losses, weights and samples. The exit code is 0 if "
        "all agree, 70 if one does not, 2 if the config does not fit.",
    )
    prove.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for `lockstep train`: model=resnet18")
    prove.add_argument("--steps", type=int, default=20, help="of each run [20]")
    prove.add_argument("--ranks", metavar="N,N", help="numbers of ranks [2,3,4, or up to the number of GPUs]")
    pack = commands.add_parser(
        "pack",
        usage="lockstep pack [--size SIZE] [--skip N] [--val-share SHARE] SOURCE TARGET\n"
        "       lockstep pack --check TARGET",
        help="decode a folder of images once, for dataset=packed",
        description="Decode SOURCE/train/CLASS/* and SOURCE/val/CLASS/* as dataset=folder does, and keep the pixels "
        "in the new folder TARGET. The exit code is 2 if the source does not fit or TARGET exists, 74 if TARGET "
        "cannot be written.",
    )
    pack.add_argument("source", nargs="?", metavar="SOURCE", help="the folder that holds train/ and val/")
    pack.add_argument("target", nargs="?", metavar="TARGET", help="the folder to make")
    pack.add_argument("--size", type=int, help="side of a stored image, as dataset.decode_size [256]")
    pack.add_argument("--skip", type=int, metavar="N", help="the most broken images to leave out [0]")
    pack.add_argument(
        "--val-share",
        type=float,
        metavar="SHARE",
        help="the share of SOURCE/train to evaluate where there is no SOURCE/val, as dataset.val_share",
    )
    pack.add_argument("--check", metavar="TARGET", help="read a packed folder whole and compare it with its hashes")
    given = parser.parse_args()
    if given.command == "pack":
        named = {
            name for name in ("source", "target", "size", "skip", "val_share") if getattr(given, name) is not None
        }
        if not (named >= {"source", "target"} if given.check is None else not named):
            pack.error("expected SOURCE and TARGET, or --check TARGET alone")
    return given


def run(given: argparse.Namespace) -> None:
    """Run a command other than `train`."""
    from lockstep.runtime import program

    with program.command_line(), program.bypass_hydra_errors():
        if given.command == "new":
            from lockstep.cli.new import new

            new(given.project)
        elif given.command == "prove":
            from lockstep.cli.prove import prove

            prove(given.overrides, steps=given.steps, ranks=given.ranks)
        else:
            from lockstep.cli import pack

            if given.check is not None:
                pack.check(given.check)
            else:
                size = 256 if given.size is None else given.size
                pack.pack(given.source, given.target, size=size, skip=given.skip or 0, val_share=given.val_share)
