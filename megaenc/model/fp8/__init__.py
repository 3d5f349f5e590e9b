"""8-bit floating point: scaled tensors, kernels and linear layers."""
