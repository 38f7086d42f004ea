"""The way out: a run's model as plain PyTorch, ONNX or an exported program, with all that is needed to use it."""
