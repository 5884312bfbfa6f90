"""Sweeps: the jobs of one command with `-m`, of Lockstep or of any other app of Hydra. Knows no trainer."""
