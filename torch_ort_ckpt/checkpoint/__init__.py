"""The hub: `CheckpointState`, names, properties, partitions, and the bridge to PyTorch's state dicts. Knows nothing of files."""
