"""What executes the graphs: ONNX Runtime or torch."""
