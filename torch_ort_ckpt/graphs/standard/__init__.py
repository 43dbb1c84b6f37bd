"""Training graphs made of standard ONNX operators only, for any onnxruntime: the optimizer's update, and one graph for a whole step."""
