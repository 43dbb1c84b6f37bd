"""Bytes on disk: mapped buffers, files, folders and sets that appear whole or not at all, locks, hashes. Knows nothing of checkpoints."""
