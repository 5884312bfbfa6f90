"""From the words of a command line to the typed values of a job. Imports no torch, so that `--help` is fast."""
