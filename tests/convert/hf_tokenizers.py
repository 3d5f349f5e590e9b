"""Small tokenizers of the model families that tests convert."""

from tokenizer_shapes import bert, llama2, llama3, modernbert, qwen, save, smollm

__all__ = ["KINDS", "llama3", "qwen", "save"]

# By name: the tokenizer, its model in hf_models.MODELS, from-hf's flags that give it a mask token.
KINDS = {
    "llama 2": (llama2, "llama with stretched positions", ["--add-mask-token"]),
    "mistral": (llama2, "mistral", ["--add-mask-token"]),
    "llama 3": (llama3, "llama with stretched positions", []),
    "smollm": (smollm, "llama with stretched positions", ["--add-mask-token"]),
    "qwen2": (qwen, "qwen2", ["--add-mask-token"]),
    "qwen3": (qwen, "qwen3", ["--add-mask-token"]),
    "modernbert": (modernbert, "modernbert", []),
    "bert": (bert, "neobert", []),
}
