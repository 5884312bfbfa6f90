"""The data path: data sets, the order of the examples, augmentation, and the two loaders."""
