"""Families of Hugging Face models with layers or names of their own: fields of config.json, and NeoBERT in PyTorch."""
