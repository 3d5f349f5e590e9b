"""Parallel, resumable tokenization of text into corpora."""
