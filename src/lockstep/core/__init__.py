"""What every other part is built on: errors, files, the plan in steps, the run folder, the ranks."""
