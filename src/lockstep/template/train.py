"""Train with `python train.py experiment=first`; `python train.py --help` shows all options and keys."""

import lockstep

if __name__ == "__main__":
    lockstep.main(extensions=["my_project"])
