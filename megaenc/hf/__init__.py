"""Hugging Face folders, read without network access or code from the folder: config.json, weights, and transformers models."""
