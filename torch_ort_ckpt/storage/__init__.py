"""Bytes on disk: mapped buffers, atomic files, folders and file sets, locks, hashes. Does not depend on checkpoints."""
