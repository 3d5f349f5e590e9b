#!/usr/bin/env bash
# Check the correctness and measure the speed of one accelerator. See `benchmarks/gpu.sh --help`.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

if [[ -n ${PYTHON:-} ]]; then
  python=$PYTHON
elif [[ -x $root/.venv/bin/python ]]; then
  python=$root/.venv/bin/python
elif ! python=$(command -v python3); then
  echo "error: python3 not found; set PYTHON to an interpreter" >&2
  exit 2
fi

for word in "$@"; do
  if [[ $word == -h || $word == --help ]]; then
    cat <<'END'
benchmarks/gpu.sh: correctness and speed on one GPU, NVIDIA's or AMD's; nothing is downloaded.

    benchmarks/gpu.sh --output gpu                              all parts: gpu/results.txt, results.jsonl, libraries.log
    benchmarks/gpu.sh --parts speed --models 1b                 one model
    benchmarks/gpu.sh --kernels attention_backend=sdpa          all parts with other kernels
    benchmarks/gpu.sh --device cpu --small                      tests the benchmark without a GPU, about a minute

megaenc need not be installed, but its dependencies must be, with Python 3.11 or 3.12: torch 2.11 or later for the GPU, and
    pip install megatron-core==0.16.1 numpy psutil tyro docstring-parser typeguard PyYAML rich packaging
and a C compiler with Python's headers (such as gcc and python3-dev), which triton needs to launch kernels; without them, fused
kernels are replaced by torch's operations and a message is printed.
Optional, for the part `peer`:
    pip install 'transformers>=5' safetensors
PYTHON sets the interpreter (default: .venv/bin/python of the repository, or python3).

END
    break
  fi
done

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
exec "$python" "$root/benchmarks/gpu.py" "$@"
