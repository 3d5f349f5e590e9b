"""Labelled data sets: the study's twelve from the Hugging Face Hub, your own from local files, demo sets made on the spot."""
