"""Train with `python train.py experiment=first`; `python train.py --help` shows Lockstep's options and keys."""

import lockstep

# The shell completes the words of a program with the text `@hydra.main` in its file.
if __name__ == "__main__":
    lockstep.main(extensions=["my_project"])
