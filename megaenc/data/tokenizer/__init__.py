"""Tokenizer training, loading and fast encoding."""
