"""The command `lockstep`: what can be done besides training."""

from __future__ import annotations

import argparse

from lockstep.runtime import signals


def main() -> None:
    """The console command `lockstep`."""
    signals.begin(says=signals.STOPPED_EARLY)
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
    pack = commands.add_parser(
        "pack",
        usage="lockstep pack [--size SIZE] [--skip N] SOURCE TARGET\n       lockstep pack --check TARGET",
        help="decode a folder of images once, for dataset=packed",
        description="Decode SOURCE/train/CLASS/* and SOURCE/val/CLASS/* as dataset=folder does, and keep the pixels "
        "in the new folder TARGET. The exit code is 2 if the source does not fit or TARGET exists, 74 if TARGET "
        "cannot be written.",
    )
    pack.add_argument("source", nargs="?", metavar="SOURCE", help="the folder that holds train/ and val/")
    pack.add_argument("target", nargs="?", metavar="TARGET", help="the folder to make")
    pack.add_argument("--size", type=int, help="side of a stored image, as dataset.decode_size [256]")
    pack.add_argument("--skip", type=int, metavar="N", help="the most broken images to leave out [0]")
    pack.add_argument("--check", metavar="TARGET", help="read a packed folder whole and compare it with its hashes")
    arguments = parser.parse_args()
    if arguments.command == "pack":
        given = {name for name in ("source", "target", "size", "skip") if getattr(arguments, name) is not None}
        if not (given >= {"source", "target"} if arguments.check is None else not given):
            pack.error("expected SOURCE and TARGET, or --check TARGET alone")
    # Imported here, because --help must not wait for it; what needs torch is further down.
    from lockstep.runtime import program

    with program.command_line(), program.bypass_hydra_errors():
        if arguments.command == "prove":
            from lockstep.cli.prove import prove as run_prove

            run_prove(arguments.overrides, steps=arguments.steps, ranks=arguments.ranks)
        else:
            from lockstep.cli import pack as packing

            size = 256 if arguments.size is None else arguments.size
            if arguments.check is not None:
                packing.check(arguments.check)
            else:
                packing.pack(arguments.source, arguments.target, size=size, skip=arguments.skip or 0)
