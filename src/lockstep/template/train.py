"""Train: `python train.py experiment=first`; `python train.py --help` shows what can be chosen."""

import lockstep

if __name__ == "__main__":
    lockstep.main(extensions=["my_project"])
