"""The command `lockstep`."""

import importlib
import os
import re
import sys

from lockstep.cli.arguments import arguments
from lockstep.core.errors import check_installed
from lockstep.core.native_threads import configure_native_threads
from lockstep.runtime import signals

SHELL_COMPLETION = {"-sc", "--shell-completion"}  # Hydra's flag, with which the shell asks for completions
# The package of each. The command is the function of its name, in the module of its name.
COMMANDS = {
    **dict.fromkeys(("new", "pack", "clean"), "cli"),
    **dict.fromkeys(("prove", "ladder", "doctor", "show", "lr-find"), "diagnostics"),
    **dict.fromkeys(("evaluate", "predict", "export", "demo"), "inference"),
    **dict.fromkeys(("runs", "compare", "report", "watch"), "report"),
}


def main() -> None:
    """The console command `lockstep`. Imports torch only when a command runs, because --help must be fast."""
    signals.begin(says=signals.STOPPED_EARLY if sys.argv[1:2] == ["train"] else signals.STOPPED)
    if SHELL_COMPLETION & set(sys.argv):
        complete()
    elif sys.argv[1:2] == ["train"]:
        train()
    else:
        run_command()
    from lockstep.runtime import program

    program.finish()


def train() -> None:
    from lockstep.cli.train import train_command as train_main

    if sys.argv[1:2] == ["train"]:
        del sys.argv[1]
    # Hydra takes the first word of the line as the program, and completes the words after it: remove `train`.
    os.environ["COMP_LINE"] = re.sub(r"^(\S*lockstep)\s+train\b", r"\1", os.environ.get("COMP_LINE", ""), count=1)
    train_main()


def complete() -> None:
    """Print the completions of the shell's line: commands, or the words of `train`. The shell itself knows files."""
    from lockstep.config import command_line

    line, shell = os.environ.get("COMP_LINE", ""), command_line.shell_asking(sys.argv)
    if not shell or re.match(r"\S*lockstep\s+train\s", line):
        train()
    elif len(words := line.split(" ")) == 2:
        command_line.write([command for command in ("train", *COMMANDS) if command.startswith(words[1])], shell)


def run_command() -> None:
    from lockstep.core.safe_read import unusable_paths
    from lockstep.runtime import program

    with program.command_line(stopped=signals.STOPPED), program.bypass_hydra_errors(), unusable_paths():
        options = arguments()
        values = {name: value for name, value in vars(options).items() if name not in ("command", "rest")}
        if options.command in ("demo", "watch"):
            check_installed("uvicorn", f"lockstep {options.command}", extra="demo")
        function = options.command.replace("-", "_")
        from lockstep.telemetry.progress import loading

        with loading():
            if options.command != "new":
                configure_native_threads()  # the others import torch
            module = importlib.import_module(f"lockstep.{COMMANDS[options.command]}.{function}")
        getattr(module, function)(**values)
