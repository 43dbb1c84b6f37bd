"""Folders of `torch.distributed.checkpoint`, read as plain data."""
