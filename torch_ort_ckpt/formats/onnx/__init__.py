"""The initializers of an ONNX model, and protobuf read in place."""
