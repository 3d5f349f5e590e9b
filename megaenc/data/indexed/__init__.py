"""Tokenized corpora on disk: megatron-core's `.bin` and `.idx`, and metadata."""
