"""Trains PyTorch models on Ray from one YAML file."""

__version__ = "0.1.0"
