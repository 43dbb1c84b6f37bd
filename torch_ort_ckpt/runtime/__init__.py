"""Training graphs as PyTorch objects: `OrtModule`, `OrtOptimizer`, `TrainingSession`."""
