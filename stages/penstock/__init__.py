"""Penstock fine-tunes language models as a pipeline of discrete, cached stages."""

__version__ = "0.1.0"
