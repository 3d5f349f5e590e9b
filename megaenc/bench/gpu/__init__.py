"""`benchmarks/gpu.sh`: is what an accelerator computes right, and how fast is it?"""
