"""Readers of JSONL, text, Parquet, Arrow and Hugging Face data sets."""
