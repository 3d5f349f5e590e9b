"""Recomputed activations: the same run in less memory."""

import pytest
import runs

from megaenc.training.command import main

RUN = [
    *runs.SHORT_RUN,
    "--num-layers",
    "4",
    "--no-bf16",
    "--eval-interval",
    "0",
    "--exit-interval",
    "3",
]
# Every kind of attention, windows, and norms everywhere.
RUN += [
    "--objective-schedule",
    "prefix_lm:1,clm:1,mlm:18",
    "--window-size",
    "3",
    "--global-attn-every-n-layers",
    "2",
]
RUN += ["--embedding-norm", "--apply-layernorm-1p", "--post-norms"]
FULL = ["--recompute-granularity", "full"]
SELECTIVE = ["--recompute-granularity", "selective"]
WAYS = {
    "full": FULL,
    "full, in units of two layers": [*FULL, "--recompute-num-layers", "2"],
    "full, three layers of four": [
        *FULL,
        "--recompute-method",
        "block",
        "--recompute-num-layers",
        "3",
    ],
    "selective": SELECTIVE,
    "activation": [*SELECTIVE, "--recompute-modules", "activation"],
    "MLP": [*SELECTIVE, "--recompute-modules", "mlp"],
    "activation and attention": [*SELECTIVE, "--recompute-modules", "activation", "core_attn"],
    "selective, all parts": [*SELECTIVE, "--recompute-modules", "core_attn", "mlp", "activation"],
}


@pytest.fixture(scope="module")
def kept_run(small_corpus, tmp_path_factory):
    directory = tmp_path_factory.mktemp("kept") / "run"
    main([*small_corpus.flags, *RUN, "--save", str(directory)])
    return directory


@pytest.mark.parametrize("way", WAYS)
def test_every_step_is_that_of_kept_activations(way, small_corpus, kept_run, tmp_path):
    main([*small_corpus.flags, *RUN, *WAYS[way], "--save", str(tmp_path / "run")])
    assert runs.curve(tmp_path / "run") == runs.curve(kept_run)


@pytest.mark.parametrize("way", WAYS)
def test_fewer_activations_are_kept(way, one_process):
    """Counted are bytes that autograd holds between forward and backward pass."""
    import torch

    from megaenc.backend import ParallelConfig
    from megaenc.model import ModelConfig
    from megaenc.model.encoder import build_encoder
    from megaenc.model.linear_cross_entropy import Predictions
    from megaenc.model.packed_sequences import PackedSequences
    from megaenc.objectives import Attention
    from megaenc.training.config import parse_config

    def kept(layout: ParallelConfig) -> int:
        encoder = build_encoder(
            ModelConfig(num_layers=4), 128, 256, layout, torch.float32, seed=1
        ).train()
        sizes = {}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            packing = PackedSequences.from_cu_seqlens(
                [0, 256], Attention.BIDIRECTIONAL, one_process.device, None
            )
            logits = encoder(
                torch.zeros(1, 256, dtype=torch.int64),
                torch.arange(256),
                packing,
                Predictions(torch.arange(4)),
            )
        del logits
        return sum(sizes.values()) - sum(parameter.nbytes for parameter in encoder.parameters())

    assert kept(parse_config(WAYS[way], "test").layout) < 0.98 * kept(ParallelConfig())


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            ["--recompute-method", "block"],
            "--recompute-method: needs --recompute-granularity full, found none",
        ),
        (["--recompute-num-layers", "0"], "--recompute-num-layers: found 0, expected 1 or more"),
        (
            [*FULL, "--recompute-method", "block", "--recompute-num-layers", "5"],
            "found 5, expected at most the 4 layers",
        ),
    ],
)
def test_what_cannot_be_recomputed_is_refused(flags, complaint, small_corpus, refusal):
    assert complaint in refusal(main, [*small_corpus.flags, *RUN, *flags])
