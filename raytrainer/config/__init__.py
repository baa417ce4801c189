"""The config of a run: its schema, loading it from YAML with overrides, and building the objects that it names.

Imports neither torch nor ray.
"""

from raytrainer.config.instantiate import add_importable, callable_from, importable, instantiate, locate
from raytrainer.config.loading import load_config
from raytrainer.config.origin import difference
from raytrainer.config.reference import json_schema, reference_markdown
from raytrainer.config.schema import Config
from raytrainer.config.section import Target

__all__ = [
    "Config",
    "Target",
    "add_importable",
    "callable_from",
    "difference",
    "importable",
    "instantiate",
    "json_schema",
    "load_config",
    "locate",
    "reference_markdown",
]
