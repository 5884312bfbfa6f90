"""Checkpoints: one folder each, written under a temporary name, hashed, renamed, and checked before use.

A folder `checkpoints/step-00000042` holds `model.safetensors` (and `ema.safetensors`), `state.pt` (optimizer and
scaler; loads with `weights_only=True`), `facts.json` (the fingerprint of the run and its progress) and
`manifest.json` (the size and the sha256 of each of these files). `checkpoints/last` and `checkpoints/best` hold the
name of a folder, for people: a resume does not read them, nor does a command that uses the weights.
"""
