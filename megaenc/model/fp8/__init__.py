"""float8 matrix products: quantization, Triton kernels and linear layers."""
