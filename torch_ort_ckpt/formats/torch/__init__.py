"""`torch.save` files, read as plain data without an unpickler."""
