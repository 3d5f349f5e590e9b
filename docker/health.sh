#!/bin/sh
# Trains two steps of a very small model on a few pages of text, on every accelerator there is, and says whether that went well.
# In the images: megaenc-health, or megaenc-health cpu, which leaves the accelerators to who uses them.
set -eu

usage() {
  echo "usage: megaenc-health [cpu]    two steps of training, on all accelerators or on the processor; NPROC=N says how many processes"
}

source=$(dirname "$(dirname "$(readlink -f "$0")")")
case "${1-}" in
  "") ;;
  cpu) export CUDA_VISIBLE_DEVICES='' HIP_VISIBLE_DEVICES='' NPROC="${NPROC:-1}" ;;
  -h | --help)
    usage
    exit
    ;;
  *)
    usage >&2
    exit 2
    ;;
esac
# Python finds megaenc as the one that runs this script has it installed.
processes=${NPROC:-$(python3 -P -c 'import torch; print(max(1, torch.cuda.device_count()))')}

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"
{ # one after the other by &&: within { } || the shell goes on after a failure, whatever set -e says
  cp "$source/LICENSE" text.txt &&
  megaenc tokenizer --input text.txt --vocab-size 400 --output tokenizer &&
  megaenc preprocess --input text.txt --output-prefix text --tokenizer tokenizer --append-eod &&
  OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node "$processes" "$source/examples/pretrain_encoder.py" \
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --num-query-groups 2 --seq-length 64 \
    --micro-batch-size 1 --global-batch-size "$processes" --train-iters 2 --eval-interval 0 --split 100,0,0 \
    --data-path text_text_document --tokenizer tokenizer --save run
} >said 2>&1 || {
  status=$?
  cat said >&2
  echo "error: two steps of training failed with exit code $status" >&2
  exit 1
}
echo "healthy: two steps trained, $processes x $(python3 -P -c '
import torch
print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else "processor")')"
