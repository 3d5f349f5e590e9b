"""The GPU benchmark's account of a step: kernels by their names and by when they ran."""

import pytest
import torch

from megaenc.bench.gpu import kernel_groups
from megaenc.bench.gpu.kernel_groups import (
    BACKWARD,
    BUFFERS,
    COMMUNICATION,
    ELEMENTWISE,
    FORWARD,
    LOSS,
    MATMUL,
    OPTIMIZER,
    KernelEvent,
    TimeWindow,
)

NAMES = {
    MATMUL: (
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
        "nvjet_sm90_qqtst_128x256_128x6_1x2_h_bz_TNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16, float, true, false>(cublasLt::cublasSplitKParams)",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1_AFC0_AFEM1",
        "triton_tem_fused_mm_3",
        "aten::mm",
        "aten::addmm_",
    ),
    FORWARD: (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>>(params)",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>(Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x128x64_4x1x1_cga1x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
        "attn_fwd.kd",
        "_ZN7ck_tile6kentryILi256ELi2ENS_13FmhaFwdKernelIN",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "_Attention: aten::bmm",
    ),
    BACKWARD: (
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128>>(params)",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<96>>(params)",
        "void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<96>>(params, int)",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwdSm90<2>>>>(Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_31_64x64x128_1x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(int)",
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<cutlass::bfloat16_t>::Params)",
        "bwd_kernel_dk_dv.kd",
        "bwd_kernel_dq.kd",
        "_ZN7ck_tile6kentryILi256ELi1ENS_22FmhaBwdDQDKDVKernelIN",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "_AttentionBackward: aten::bmm",
    ),
    OPTIMIZER: (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>, "
        "at::native::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>>(int)",
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float, int>>(long, int volatile*)",
        "aten::_fused_adamw_",
    ),
    COMMUNICATION: (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "rccl_main_kernel(ncclDevComm*)",
        "ncclKernel_AllReduce_RING_LL_Sum_float",
        "c10d::allreduce_",
    ),
    BUFFERS: (
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "__amd_rocclr_copyBuffer.kd",
        "__amd_rocclr_fillBufferAligned.kd",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>(int)",
        "void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>, 4>(int)",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>",
        "aten::copy_",
        "aten::zero_",
    ),
    LOSS: (
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>(float*, float const*, int)",
        "cross_entropy_statistics_kernel",
        "cross_entropy_gradient_kernel",
        "_cross_entropy_forward",
        "_loss_kernel",
    ),
    ELEMENTWISE: (
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
        "triton_poi_fused_mul_silu_1",
        "_swiglu_backward",
        "norm_forward_kernel",
        "norm_backward_kernel",
        "rotary_kernel",
        "glu_forward_kernel",
        "glu_backward_kernel",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>(int)",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>(int)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>(int)",
        "aten::mul",
    ),
}


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in NAMES.items() for name in names])
def test_kernels_are_known_by_their_names(group, name):
    assert kernel_groups.classify_kernel(name) == group


def test_what_ran_in_a_window_is_for_its_purpose():
    ran = [
        KernelEvent("aten::mul", 5, 1.0),  # before the window
        KernelEvent("aten::mul", 12, 2.0),
        KernelEvent("aten::mm", 15, 4.0),  # a matrix product is one wherever it is
        KernelEvent("aten::mul", 20, 8.0),  # at its very end
        KernelEvent("aten::mul", 21, 16.0),
        KernelEvent("ncclDevKernel_AllReduce", 33, 32.0),
        KernelEvent("aten::sqrt", 34, 64.0),
    ]
    results = kernel_groups.sum_by_group(reversed(ran), [TimeWindow(OPTIMIZER, 30, 40), TimeWindow(LOSS, 10, 20)])
    expected = {ELEMENTWISE: 17.0, LOSS: 10.0, MATMUL: 4.0, COMMUNICATION: 32.0, OPTIMIZER: 64.0}
    assert results == dict.fromkeys(kernel_groups.GROUPS[:-1], 0.0) | expected


def test_the_next_thing_is_of_what_takes_most_beside_products():
    seconds = {MATMUL: 9.0, FORWARD: 1.0, BACKWARD: 1.5, ELEMENTWISE: 2.0, kernel_groups.IDLE: 0.5}
    assert kernel_groups.suggest_optimization(seconds).startswith("attention takes most")
    assert kernel_groups.suggest_optimization(seconds | {ELEMENTWISE: 3.0}).startswith(
        "norm, rotary, SwiGLU, elementwise takes most"
    )
    assert set(kernel_groups.SUGGESTIONS) == set(kernel_groups.GROUPS)


def test_kernels_of_the_accelerator_are_those_of_its_timeline():
    from types import SimpleNamespace

    from megaenc.bench.gpu import breakdown

    kinds = torch.autograd.DeviceType

    def event(name, kind, began, duration):  # in microseconds
        time = SimpleNamespace(start=began, elapsed_us=lambda: duration)
        return SimpleNamespace(name=name, device_type=kind, time_range=time, self_cpu_time_total=0, cpu_parent=None)

    events = [
        event("cudaLaunchKernel", kinds.CPU, 0.005, 0.1),
        event("nvjet_tst_1", kinds.CUDA, 0.01, 3000),
        event("aFusedAdam", kinds.CUDA, 0.04, 1000),
        event("elementwise", kinds.CUDA, 0.041, 500),
    ]
    results = SimpleNamespace(trace_start_ns=lambda: 0)
    profiled = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results), events=lambda: events)
    ran = list(breakdown.iter_kernel_events(False, profiled))
    assert [one.name for one in ran] == ["nvjet_tst_1", "aFusedAdam", "elementwise"]
    timed = {"seconds_per_update": 0.003, "flops_per_update": 5e9, "attention_flops_per_update": 2e9}
    values = breakdown.summarize_events(ran, [TimeWindow(OPTIMIZER, 35, 50)], timed)
    assert values["seconds"][MATMUL] == pytest.approx(0.003 / breakdown.STEPS)
    assert values["seconds"][OPTIMIZER] == pytest.approx(0.0015 / breakdown.STEPS)
    assert values["shares"][kernel_groups.IDLE] == pytest.approx(1 - 0.0045 / breakdown.STEPS / 0.003)
    assert values["matrix_flops_per_second"] == pytest.approx(3e9 / (0.003 / breakdown.STEPS))
    assert values["attention_flops_per_second"] is None and values["by_time_too"]
    assert not breakdown.summarize_events(ran, [TimeWindow(OPTIMIZER, 10**18, 2 * 10**18)], timed)["by_time_too"]
