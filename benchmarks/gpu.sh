#!/usr/bin/env bash
# Is what an accelerator computes right, and how fast is it? See `benchmarks/gpu.sh --help`.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

if [[ -n ${PYTHON:-} ]]; then
  python=$PYTHON
elif [[ -x $root/.venv/bin/python ]]; then
  python=$root/.venv/bin/python
elif ! python=$(command -v python3); then
  echo "error: python3 not found; say which in PYTHON" >&2
  exit 2
fi

for word in "$@"; do
  if [[ $word == -h || $word == --help ]]; then
    cat <<'END'
benchmarks/gpu.sh: correctness and speed on one GPU, NVIDIA's or AMD's, in under nine minutes; nothing is downloaded.

    benchmarks/gpu.sh --output gpu.json                    all of it: gpu.json, gpu.md, gpu.log
    benchmarks/gpu.sh --phases speed --models 1b           one model
    benchmarks/gpu.sh --kernels attention_backend=sdpa     all of it by other kernels
    benchmarks/gpu.sh --device cpu --small                 tries the benchmark itself, about a minute, without a GPU

This package need not be installed, but what it imports must be, in Python 3.11 or 3.12: torch 2.11 or later for the GPU, and
    pip install megatron-core==0.16.1 numpy psutil tyro docstring-parser typeguard PyYAML rich
and a C compiler with Python's headers (gcc and python3-dev, or their like), with which triton builds what starts its kernels; without
them torch's own operations stand in for the fused kernels, and a line says so.
For the phase `peer`, which is left out without them:
    pip install 'transformers>=5' safetensors
PYTHON says which interpreter; otherwise .venv/bin/python of this folder, or python3.

END
    break
  fi
done

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
exec "$python" -P -m megaenc.bench.gpu "$@"
