"""Labelled data sets: the study's twelve on the Hub, local files and demo sets."""
