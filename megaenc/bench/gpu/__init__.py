"""`benchmarks/gpu.sh`: correctness and speed on an accelerator."""
