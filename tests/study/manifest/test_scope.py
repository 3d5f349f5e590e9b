"""What a manifest says of the study that a report is of."""

from megaenc.finetune.results.aggregate import GridSpec
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.manifest.scope import build_scope

MANIFEST = """
sizes:
  large: {num_layers: 4, hidden_size: 128, ffn_hidden_size: 256, num_attention_heads: 4, num_query_groups: 2}
  small: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, num_query_groups: 2}
  medium: {num_layers: 3, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, num_query_groups: 2}
pretrain: {seq_length: 128, global_batch_size: 16, lr_warmup_iters: 10, lr_wsd_decay_iters: 10}
corpus: {demo: true, vocab_size: 4096}
models:
  - {size: [large, medium, small], steps: 100, clm_share: 1, checkpoints: [50]}
finetune: {datasets: [demo_sc, demo_qa], learning_rates: [1e-3, 2e-4], seeds: 3}
"""


def test_sizes_models_and_grid_are_the_manifests(tmp_path):
    (tmp_path / "study.yaml").write_text(MANIFEST)
    scope = build_scope(read_manifest(tmp_path / "study.yaml"))
    assert scope.sizes == ("small", "medium", "large")
    assert scope.model_keys["small-clm-100"] == ModelKey("small", 100) and len(scope.model_keys) == 6
    assert scope.grid == GridSpec((2e-4, 1e-3), (0, 1, 2)) and scope.datasets == (("SC", "demo_sc"), ("QA", "demo_qa"))
    (tmp_path / "study.yaml").write_text(MANIFEST[: MANIFEST.index("finetune")])
    assert build_scope(read_manifest(tmp_path / "study.yaml")).grid is None
