"""Embeddings of texts by encoders without a trained head: zero-shot retrieval."""
