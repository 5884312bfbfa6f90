"""What this project adds to Lockstep. Importing it declares its options."""

from my_project import data, model

__all__ = ["data", "model"]
