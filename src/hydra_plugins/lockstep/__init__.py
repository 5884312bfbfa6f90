"""Hydra plugins of Lockstep. Hydra finds them by the name of this package."""
