"""Fused kernels on two tensor-parallel ranks: torch's loss and gradients."""

import numpy as np
import torch


def main() -> None:
    from megaenc import backend
    from megaenc.backend import KernelConfig, ParallelConfig, prepare_megatron

    layout = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    prepare_megatron()
    backend.init_distributed(layout, 0)
    from megaenc.model import ModelConfig
    from megaenc.model.encoder import build_encoder
    from megaenc.model.linear_cross_entropy import Predictions
    from megaenc.model.packed_sequences import PackedSequences
    from megaenc.objectives import Attention

    draw = np.random.default_rng(0)
    # The second rank has 22 ids of 150.
    tokens = torch.from_numpy(draw.integers(0, 150, 32))
    labels = torch.from_numpy(draw.integers(0, 150, 11))

    def outcome(kernels: KernelConfig, **options: str | bool) -> tuple[bool, list[torch.Tensor]]:
        shape = ModelConfig(2, 48, 80, 4, 2, **options)
        encoder = build_encoder(shape, 150, 32, layout, torch.float32, seed=3, kernels=kernels)
        packing = PackedSequences.from_cu_seqlens(
            [0, 5, 32], Attention.BIDIRECTIONAL, torch.device("cpu")
        )
        loss, correct = encoder(
            tokens[None], torch.arange(32), packing, Predictions(torch.arange(0, 32, 3), labels)
        )
        loss.backward()
        return encoder.fused.loss, [
            loss.detach(),
            correct,
            *(weight.grad for weight in encoder.parameters()),
        ]

    modernbert = {"normalization": "LayerNorm", "activation": "gelu"}
    # Without norms of heads, the projection is split and rotated in one pass.
    for options in ({}, {"qk_layernorm": True}, modernbert):
        is_fused, actual = outcome(KernelConfig(fused_kernels=True), **options)
        assert is_fused
        is_fused, expected = outcome(KernelConfig(fused_kernels=False), **options)
        assert not is_fused
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        assert all(gradient.abs().max() > 0 for gradient in actual[2:])
    backend.destroy_distributed()


if __name__ == "__main__":
    main()
