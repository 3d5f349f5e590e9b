"""The layers of each rank."""

import dataclasses

import pytest

from megaenc.backend import ParallelConfig, prepare_megatron
from megaenc.errors import InputError


@pytest.mark.parametrize(
    ("layers", "stages", "split"),
    [
        (26, 1, (26,)),
        (26, 4, (6, 7, 7, 6)),
        (26, 8, (3, 3, 3, 4, 4, 3, 3, 3)),
        (27, 4, (7, 7, 7, 6)),
        (5, 3, (2, 2, 1)),
    ],
)
def test_layers_that_do_not_divide_are_spread_from_the_middle(layers, stages, split):
    assert ParallelConfig(1, stages).layers_per_chunk(layers) == split


@pytest.mark.parametrize(
    ("text", "split", "chunks"),
    [
        ("Et*6|t*7|t*7|t*6L", (6, 7, 7, 6), 1),
        ("E|(t*9|)*2,t*8L", (0, 9, 9, 8), 1),
        ("Et*4|(t*3|)*6,t*4L", (4, 3, 3, 3, 3, 3, 3, 4), 2),
    ],
)
def test_split_as_megatron_writes_it(text, split, chunks):
    layout = ParallelConfig(1, 4, pipeline_model_parallel_layout=text)
    assert layout.layers_per_chunk(26) == split
    assert layout.chunks_per_stage(26) == chunks
    prepare_megatron()
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    parts = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert tuple(part.count(LayerType.decoder) for part in parts) == split


def test_interleaved_parts_are_dealt_out_in_turns():
    layout = ParallelConfig(1, 4, num_layers_per_virtual_pipeline_stage=2)
    assert layout.layers_per_chunk(24) == (2,) * 12
    assert layout.chunks_per_stage(24) == 3
    assert (
        layout.describe(24, 8)
        == "TP 1, PP 4 (layers 2 + 2 + 2 | 2 + 2 + 2 | 2 + 2 + 2 | 2 + 2 + 2), DP 2"
    )


@pytest.mark.parametrize(
    ("layers", "stages", "options", "complaint"),
    [
        (2, 3, {}, "--pipeline-model-parallel-size: found 3, expected at most the 2 layers"),
        (4, 1, dict(num_layers_per_virtual_pipeline_stage=1),
         "found --pipeline-model-parallel-size 1, expected 2 or more"),
        (26, 4, dict(num_layers_per_virtual_pipeline_stage=3),
         "26 layers on 4 stages are not two or more chunks of 3 on each"),
        (8, 4, dict(num_layers_per_virtual_pipeline_stage=2), "not two or more chunks of 2"),
        (4, 2, dict(pipeline_model_parallel_layout="Ett|tL"),
         "expected E, t for each of the 4 layers, then L"),
        (4, 2, dict(pipeline_model_parallel_layout="Et|t|ttL"),
         "found 3 parts, expected 2 or a multiple of it, none of them"),
        (4, 2, dict(pipeline_model_parallel_layout="Ett,ttL,x"),
         "expected E, t for each of the 4 layers, then L"),
        (4, 2, dict(pipeline_model_parallel_layout="Ett||t|tL"), "none of them empty"),
        (4, 2, dict(
            pipeline_model_parallel_layout="Ett|ttL", num_layers_per_virtual_pipeline_stage=1),
         "found with --pipeline-model-parallel-layout"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(layers, stages, options, complaint):
    with pytest.raises(InputError, match=complaint):
        ParallelConfig(1, stages, **options).layers_per_chunk(layers)


@pytest.mark.parametrize(
    ("layout", "has_layers"),
    [
        ("", True),
        ("Et*2|t*2L", True),
        ("E|t*4|L", False),
        ("E|(t|)*3L", False),
        ("Et|(t|t)*2L", True),
    ],
)
def test_the_last_layer_selects_rows_if_the_output_layer_follows_on_its_stage(layout, has_layers):
    config = ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout)
    assert config.selects_rows is has_layers
    assert not dataclasses.replace(config, sequence_parallel=True).selects_rows


@pytest.mark.parametrize(
    ("layout", "processes", "complaint"),
    [
        (
            ParallelConfig(2, 1),
            3,
            "3 processes cannot be laid out as tensor parallel 2 x pipeline parallel 1: "
            ".* multiple of 2",
        ),
        (ParallelConfig(2, 2), 2, "expected a multiple of 4"),
        (
            ParallelConfig(1, 1, sequence_parallel=True),
            1,
            "--sequence-parallel: found --tensor-model-parallel-size 1",
        ),
    ],
)
def test_layout_that_does_not_fit(layout, processes, complaint):
    with pytest.raises(InputError, match=complaint):
        layout.check(processes)
