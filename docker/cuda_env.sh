# shellcheck shell=sh
# Settings for CUDA and NCCL, to be sourced: . docker/cuda_env.sh
# A variable that is set already wins; one that is set to nothing (NAME=) is taken out, so that the library's own default holds.
# None could be measured here. What belongs to a network (NCCL_SOCKET_IFNAME, NCCL_IB_HCA) is the cluster's to say.

megaenc_default() {
  megaenc_found=
  eval "megaenc_found=\${$1-unset}"
  case $megaenc_found in
    unset) export "$1=$2" ;;
    "") unset "$1" ;;
    *) export "${1?}" ;;
  esac
}

# Kernels start in the order they were launched in, on which megatron-core's overlap with communication counts.
megaenc_default CUDA_DEVICE_MAX_CONNECTIONS 1
# Memory is taken in pieces that can grow, so that less of it lies between tensors of different sizes.
megaenc_default PYTORCH_ALLOC_CONF expandable_segments:True
# Collectives run on streams of high priority, so that they overlap with computing instead of waiting for it.
megaenc_default TORCH_NCCL_HIGH_PRIORITY 1
# What NCCL finds wrong is said, and nothing else; INFO says which network it has found too.
megaenc_default NCCL_DEBUG WARN
# Kernels are compiled once a node, on its own disk: a home directory on the network would be written by all processes at once.
megaenc_default TRITON_CACHE_DIR "${TMPDIR:-/tmp}/triton-$(id -u)"

unset -f megaenc_default
unset megaenc_found
