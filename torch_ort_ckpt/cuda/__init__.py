"""All that differs on CUDA: devices, streams, ONNX Runtime's provider, its kernels, and copies to the host. Each rule with its reason.

Written from the sources of ONNX Runtime 1.19.2 and PyTorch, and tested against a model of their rules (`tests/cuda_model`). It has not been
run on hardware: `torch-ort-ckpt doctor --cuda` does that.
"""
