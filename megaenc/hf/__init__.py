"""Hugging Face directories: config.json, weights, and transformers models.

They are read without network access or code from the directory.
"""
