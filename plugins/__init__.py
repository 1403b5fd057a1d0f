"""Custom operators: reference arithmetic, ONNX function body, kernels."""
