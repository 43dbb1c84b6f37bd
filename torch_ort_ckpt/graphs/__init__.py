"""ONNX graphs: the artifacts, what they hold, rewrites, gradients, translation to PyTorch, export. Nothing here runs a training step."""
