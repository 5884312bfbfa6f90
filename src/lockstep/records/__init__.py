"""The records of sweeps and their jobs, and runs side by side: read, grouped and shown. Knows no trainer."""
