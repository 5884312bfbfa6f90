"""The data path: sources, the order of a run, keyed augmentation, and the two loaders."""
