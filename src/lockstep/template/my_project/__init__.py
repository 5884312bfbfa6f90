"""What this project adds to Lockstep. Importing it declares its options."""

from my_project import data, loss, model

__all__ = ["data", "loss", "model"]
