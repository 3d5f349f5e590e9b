"""Labelled data sets: the study's twelve on the Hugging Face Hub, local files and demo sets."""
