"""Weight gradients that products add to buffers, equal to sums of gradients."""

import pytest
import runs
import torch

RUN = [*runs.SHORT_RUN, "--global-batch-size", "16", "--micro-batch-size", "4"]


def gradients(small_corpus, flags, prepare=lambda engine: None):
    """Return the gradient buffers of the first step, and the names products added to."""
    from megaenc import backend
    from megaenc.training.config import parse_config
    from megaenc.training.planning import build_plan

    plan = build_plan(parse_config([*small_corpus.flags, *RUN, *flags], "test"))
    device = backend.init_distributed(plan.settings.layout, plan.settings.seed)
    from megaenc.training.engine import Engine

    try:
        engine = Engine(plan, device)
        prepare(engine)
        engine.zero_grad()
        engine.run_micro_batches(engine.micro_batch_specs(1), (), train=True)
        [model] = engine.chunks
        weights = dict(model.named_parameters())
        return (
            {
                name.split("module.")[-1]: weight.main_grad.clone()
                for name, weight in weights.items()
            },
            {
                name.split("module.")[-1]
                for name, weight in weights.items()
                if weight.grad_added_to_main_grad
            },
        )
    finally:
        backend.destroy_distributed()


def add_afterwards(engine):
    """Let DDP's hooks add the gradients, as without the stand-in."""
    for module in engine.chunks[0].modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = False


@pytest.mark.parametrize(
    "flags", [["--no-bf16"], ["--bf16"], ["--no-bf16", "--no-untie-embeddings-and-output-weights"]]
)
def test_the_sums_are_those_of_gradients_added_afterwards(flags, small_corpus):
    fused, fused_names = gradients(small_corpus, flags)
    plain, plain_names = gradients(small_corpus, flags, add_afterwards)
    expected = {name for name in fused if "linear" in name}
    if "--no-untie-embeddings-and-output-weights" not in flags:
        expected.add("output_layer.weight")
    assert fused_names == expected
    assert not plain_names
    for name, gradient in fused.items():
        difference = float((gradient - plain[name]).norm() / plain[name].norm())
        # In bfloat16 the host rounds each product as before; the head's is no longer rounded after
        # its parts are added up.
        tolerance = 2e-3 if name == "output_layer.weight" and "--bf16" in flags else 1e-6
        assert difference <= tolerance, name


def test_products_in_float32_are_exact_sums(small_corpus, monkeypatch):
    """Accelerators add in float32; the reference sums the same products in float64."""
    from megaenc.backend import main_grad
    from megaenc.model import linear_cross_entropy

    exact: dict[int, torch.Tensor] = {}

    def accumulate(total, a, b, *, in_float32):
        """Compute addmm with `out_dtype` as an accelerator does; note the float64 sum."""
        if total is not None:
            exact.setdefault(total.data_ptr(), torch.zeros(total.shape, dtype=torch.float64)).add_(
                a.double() @ b.double()
            )
        return total.addmm_(a.float(), b.float())

    buffers: dict[str, int] = {}

    def note_buffers(engine):
        for name, weight in engine.chunks[0].named_parameters():
            buffers[name.split("module.")[-1]] = weight.main_grad.data_ptr()

    for module in (main_grad, linear_cross_entropy):
        monkeypatch.setattr(module, "accumulate_matmul", accumulate)
    found, added = gradients(small_corpus, ["--bf16"], note_buffers)
    assert len(added) == len(exact)
    for name in added:
        expected = exact[buffers[name]]
        assert (found[name] - expected).norm() < 2e-6 * expected.norm()


def test_a_stand_in_leaves_apex_alone(monkeypatch):
    from megaenc.backend import main_grad, prepare_megatron

    prepare_megatron()
    from megatron.core.tensor_parallel import layers

    apex = object()
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", apex)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    main_grad.install()
    assert layers.fused_weight_gradient_mlp_cuda is apex


def test_the_check_at_the_start_tells_exact_sums_from_rounded_ones(one_process, monkeypatch):
    from megaenc.backend import main_grad
    from megaenc.model.kernels.selftest import LayerWidths, check_kernel

    widths = LayerWidths(hidden=48, head=12, ffn=80, vocabulary=128)
    plain = main_grad.accumulate_matmul

    def in_float32(total, a, b, *, in_float32):
        product = a.float() @ b.float()
        return product if total is None else total.add_(product)

    monkeypatch.setattr(main_grad, "accumulate_matmul", in_float32)
    assert check_kernel("sum", torch.device("cpu"), torch.bfloat16, widths).passed
    monkeypatch.setattr(
        main_grad, "accumulate_matmul", lambda *matrices, **_: plain(*matrices, in_float32=False)
    )
    verdict = check_kernel("sum", torch.device("cpu"), torch.bfloat16, widths)
    assert verdict.available and verdict.reason.startswith("a sum of products is off by")
