"""Labelled images: the datasets of the paper, your own images, and rendered streets."""

from selfadapt.data.catalog import DATASETS
from selfadapt.data.datasets import DataConfig, open_dataset, open_datasets
from selfadapt.data.layouts import Pair
from selfadapt.data.samples import Dataset, Sample

__all__ = ["DATASETS", "DataConfig", "Dataset", "Pair", "Sample", "open_dataset", "open_datasets"]
