"""Readers of JSONL, CSV, TSV, text, Parquet, Arrow and Hugging Face data sets."""
