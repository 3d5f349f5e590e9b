"""FLOPs of the metrics against torch's count of executed matrix products."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megaenc.backend import ParallelConfig
from megaenc.model import ModelConfig
from megaenc.objectives import Attention

SHAPE = ModelConfig(
    num_layers=2, hidden_size=32, ffn_hidden_size=80, num_attention_heads=4, num_query_groups=2
)
CU_SEQLENS = [0, 5, 6, 20, 32]
PREFIXES = [2, 0, 13, 4]
VOCABULARY = 128  # what a rank's share is padded to
IN_PLACE = {
    torch.ops.aten.addmm_: lambda _, a, b, **others: 2 * a[0] * a[1] * b[1]
}  # torch's counter leaves it out


def executed(attention, predict_at, shape=SHAPE, classes=0):
    """Return torch's count, forward and backward, and the documents of the row."""
    from megaenc.model.encoder import build_encoder
    from megaenc.model.linear_cross_entropy import Predictions
    from megaenc.model.packed_sequences import PackedSequences

    encoder = build_encoder(shape, VOCABULARY, 32, ParallelConfig(), torch.float32, seed=3)
    positions = torch.cat(
        [torch.arange(stop - start) for start, stop in itertools.pairwise(CU_SEQLENS)]
    )
    prefixes = np.array(PREFIXES) if attention == Attention.PREFIX else None
    packing = PackedSequences.from_cu_seqlens(CU_SEQLENS, attention, torch.device("cpu"), prefixes)
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter,
    ):
        labels = torch.zeros(len(predict_at), dtype=torch.long)
        loss, _ = encoder(
            torch.arange(32)[None],
            positions,
            packing,
            Predictions(torch.tensor(predict_at), labels, classes=classes),
        )
        loss.backward()
    return counter.get_total_flops(), packing.spans()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("predict_at", [[3, 7, 30], list(range(32))])
def test_flops_are_those_of_the_executed_products(attention, predict_at):
    """Plain products also compute the half that a causal mask hides and kernels skip."""
    counted, spans = executed(attention, predict_at)
    hidden_half = sum((stop - prefix) ** 2 for _, prefix, stop in spans)
    assert (hidden_half == 0) == (attention == Attention.BIDIRECTIONAL)
    told = SHAPE.training_flops(VOCABULARY, len(predict_at), spans)
    assert counted == told + 6 * SHAPE.num_layers * SHAPE.hidden_size * hidden_half
    of_classes, _ = executed(attention, predict_at, classes=2)
    assert told - SHAPE.training_flops(2, len(predict_at), spans) == counted - of_classes


@pytest.mark.usefixtures("one_process")
def test_flops_of_a_model_with_a_head_and_windows_that_hide_nothing():
    """A window counts only the pairs inside; kernels skip only some of the others."""
    local = dict(
        window_size=13,
        embedding_norm=True,
        prediction_head=True,
        output_layer_bias=True,
        activation="gelu",
    )
    shape = dataclasses.replace(SHAPE, **local)
    counted, spans = executed(Attention.BIDIRECTIONAL, [3, 7, 30], shape)
    assert (
        counted
        == shape.training_flops(VOCABULARY, 3, spans)
        > SHAPE.training_flops(VOCABULARY, 3, spans)
    )
