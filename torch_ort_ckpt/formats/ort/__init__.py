"""The flatbuffer checkpoint of ONNX Runtime 1.16 and later, and its `.data` file."""
