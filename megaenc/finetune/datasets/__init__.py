"""Labelled data sets: the study's twelve from the Hugging Face Hub, local files, and demo sets."""
