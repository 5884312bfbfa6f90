"""The options that this project adds to Lockstep. Importing the package declares them."""

from my_project import data, loss, model

__all__ = ["data", "loss", "model"]
