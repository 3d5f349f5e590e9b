"""Families of Hugging Face models with layers or names of their own: their fields of config.json."""
