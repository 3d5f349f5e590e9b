"""Packs of `seq_length` tokens from documents, their order, and blends of corpora."""
