"""Between megatron-core's checkpoints and Hugging Face's folders: one table of names and shapes, read in both directions."""
