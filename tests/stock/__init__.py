"""Training in stock builds of onnxruntime, which have no training operators."""
