# shellcheck shell=sh
# Settings for ROCm and RCCL, to be sourced: . docker/rocm_env.sh
# A variable that is set already wins; one that is set to nothing (NAME=) is taken out, so that the library's own default holds.
# They are those of AMD's public launchers of Megatron; none could be measured here.

megaenc_default() {
  megaenc_found=
  eval "megaenc_found=\${$1-unset}"
  case $megaenc_found in
    unset) export "$1=$2" ;;
    "") unset "$1" ;;
    *) export "${1?}" ;;
  esac
}

# Scratch memory stays with its queue: taking it back under load has ended runs with HSA_STATUS_ERROR_OUT_OF_RESOURCES.
megaenc_default HSA_NO_SCRATCH_RECLAIM 1
# The same for the newer, asynchronous way of taking it back (gfx942 and later).
megaenc_default HSA_ENABLE_SCRATCH_ASYNC_RECLAIM 0
# Copies go over the DMA engines and leave the compute units to the kernels.
megaenc_default HSA_ENABLE_SDMA 1
# A hardware queue for computing and one for communication; more of them contend.
megaenc_default GPU_MAX_HW_QUEUES 2
# Kernels start in the order they were launched in, on which megatron-core's overlap with communication counts.
megaenc_default CUDA_DEVICE_MAX_CONNECTIONS 1

# Collectives run on streams of high priority, so that they overlap with computing instead of waiting for it.
megaenc_default TORCH_NCCL_HIGH_PRIORITY 1
# No check of the arguments at every collective.
megaenc_default NCCL_CHECKS_DISABLE 1
# A ring stays on the network cards of one rail.
megaenc_default NCCL_CROSS_NIC 0
# No detour over a neighbour's network card, which costs memory on the neighbour.
megaenc_default NCCL_PXN_DISABLE 1
# Larger pieces between the stages of a pipeline on different nodes.
megaenc_default NCCL_P2P_NET_CHUNKSIZE 524288
# RCCL's own algorithms rather than MSCCL's: steadier.
megaenc_default RCCL_MSCCL_ENABLE 0

# Kernels are compiled once a node, on its own disk: a home directory on the network would be written by all processes at once.
megaenc_default TRITON_CACHE_DIR "${TMPDIR:-/tmp}/triton-$(id -u)"

# Nothing of NVTE_*_ATTN, which AMD's launchers set: they are about Transformer Engine's attention, which is not used, and are of no
# effect here.

unset -f megaenc_default
unset megaenc_found
