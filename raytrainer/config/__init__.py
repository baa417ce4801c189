"""The config of a run: its schema, loading it from YAML with overrides, building the objects that it names.

Imports neither torch nor ray.
"""

from raytrainer.config.instantiate import callable_from, check_target, instantiate, takes
from raytrainer.config.loading import load_config
from raytrainer.config.locate import add_importable, importable, locate
from raytrainer.config.origin import difference
from raytrainer.config.placing import names_places
from raytrainer.config.reference import json_schema, reference_markdown
from raytrainer.config.schema import Config
from raytrainer.config.section import Target

__all__ = [
    "Config",
    "Target",
    "add_importable",
    "callable_from",
    "check_target",
    "difference",
    "importable",
    "instantiate",
    "json_schema",
    "load_config",
    "locate",
    "names_places",
    "reference_markdown",
    "takes",
]
