"""Train an image classifier: `python train.py --help` lists the options."""

from __future__ import annotations

from lockstep.runtime import signals

# The shell completes the words of a program with the text `@hydra.main` in its file.
if __name__ == "__main__":
    signals.begin(says=signals.STOPPED_EARLY)  # before the imports, which take seconds
    from lockstep.cli.train import train_command
    from lockstep.runtime import program

    train_command()
    program.finish()
