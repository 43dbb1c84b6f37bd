"""A model of CUDA and of ONNX Runtime's CUDA provider, for tests on machines without a GPU.

"Device" tensors are CPU tensors in an arena of their own, so all numbers are computed for real. What the model adds is CUDA's rules:

- `machine`: streams, events and host threads with vector clocks. Two conflicting accesses to memory without an order are a `Race`.
- `memory`: an allocator that hands a freed block out again at once to the stream it was allocated on, as PyTorch's does.
- `kernels`: every operator of PyTorch is a launch on the current stream. Mixing devices is refused, waits for the device are counted.
- `interface`: `torch.cuda`'s functions and classes.
- `provider`: InferenceSession and IOBinding with the rules of ONNX Runtime 1.19.2; the real CPU session computes the results.

It proves nothing about numerics, cuDNN or the loading of libraries.
"""
