"""All weights of a model at once, which conversions never hold in memory."""

from torch import Tensor

from megaenc.convert.param_mapping import iter_hf_tensors, iter_mappings
from megaenc.convert.run_checkpoint import RunCheckpoint
from megaenc.model import ModelConfig


def load_weights(run: RunCheckpoint, step: int | None) -> tuple[int, dict[str, Tensor]]:
    """Return the step (None: newest) and all weights of its checkpoint.

    The names are those of megatron-core; one process holds all of them.
    """
    with run.load_encoder(step) as (found, encoder):
        return found, {
            name: parameter.detach().cpu() for name, parameter in encoder.named_parameters()
        }


def core_to_hf(
    state: dict[str, Tensor], model: ModelConfig, vocab_size: int, family: str | None = None
) -> dict[str, Tensor]:
    """Return Hugging Face's state dict of a megatron-core one, with `family`'s names.

    Rows that pad the vocabulary are left out.
    """
    return dict(iter_hf_tensors(state, model, vocab_size, family))


def hf_to_core(state: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return megatron-core's state dict of a Hugging Face one, without padding."""
    return {
        core: rule.to_core(tuple(state[name] for name in names), model)
        for rule, core, names in iter_mappings(model)
    }
