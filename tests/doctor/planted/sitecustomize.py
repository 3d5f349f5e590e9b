"""Python imports this when it starts: the faults that PLANTED names are put into the process that carries probes out."""

import os
import sys

if "megaenc.doctor.probing" in " ".join(sys.orig_argv):
    faults = os.environ.get("PLANTED", "").split(",")
    odd = os.environ.get("RANK") == "1"
    if "causal ignored" in faults:
        import torch.nn.functional as F

        right = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = lambda *tensors, is_causal=False, **others: right(*tensors, **others)
    if "odd version" in faults and odd:
        from importlib import metadata

        version = metadata.version
        metadata.version = lambda name: "5.0.99" if name == "transformers" else version(name)
    if "clock ahead" in faults and odd:
        import time

        clock = time.time
        time.time = lambda: clock() + 90
