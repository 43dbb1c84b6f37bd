"""Graphs run by ONNX Runtime on PyTorch's memory."""
