"""The hub: `CheckpointState`, names, properties, partitions, and the bridge to PyTorch's state dicts. Does not depend on files."""
