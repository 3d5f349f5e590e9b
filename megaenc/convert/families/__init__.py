"""Families of Hugging Face models whose layers are not those of Llama."""
