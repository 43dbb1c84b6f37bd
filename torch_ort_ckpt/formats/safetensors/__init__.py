"""safetensors: the checkpoint, and one file of it."""
