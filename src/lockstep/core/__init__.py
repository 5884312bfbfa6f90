"""The base of all other parts: errors, files, the plan in steps, the run folder, the ranks."""
