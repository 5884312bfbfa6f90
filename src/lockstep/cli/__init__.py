"""`lockstep COMMAND`: what there is to do with a job besides training it."""

from __future__ import annotations

import argparse

from lockstep import refusals


def main() -> None:
    """The console command `lockstep`."""
    parser = argparse.ArgumentParser(prog="lockstep", description="Commands around train.py.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    prove = commands.add_parser(
        "prove",
        help="show on this machine that a config is the same run under every strategy and world size",
        description="Train a config for a few steps under every strategy and on every number of ranks that this "
        "machine allows, kill one run and resume it, and compare losses, weights and samples. The exit code is 0 if "
        "all agree, 70 if one does not, 2 if the config does not fit.",
    )
    prove.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for train.py, e.g. model=resnet18")
    prove.add_argument("--steps", type=int, default=20, help="of each run [20]")
    prove.add_argument("--ranks", metavar="N,N", help="numbers of ranks [2,3,4, or up to the number of GPUs]")
    arguments = parser.parse_args()
    with refusals.command_line():
        from lockstep.cli.prove import prove as run  # needs torch

        run(arguments.overrides, steps=arguments.steps, ranks=arguments.ranks)
