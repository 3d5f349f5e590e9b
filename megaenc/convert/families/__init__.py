"""Families of Hugging Face models: their layers and their fields of config.json."""
