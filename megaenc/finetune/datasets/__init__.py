"""Labelled data sets: the study's twelve from the Hugging Face Hub, your own from local files, demo sets made on the spot."""

from megaenc.finetune.datasets.base import Dataset
from megaenc.finetune.datasets.local import DataFlags
from megaenc.finetune.datasets.registry import DATASETS, find

__all__ = ["DATASETS", "DataFlags", "Dataset", "find"]
