"""Tokenized corpora on disk: the `.bin`/`.idx` format of megatron-core, metadata, verification."""
