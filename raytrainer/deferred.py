"""Keeps torch's compiler out of a process that compiles nothing: 2 of the 4.5 CPU-seconds of its start.

Optimizers and DistributedDataParallel import torch._dynamo, and with it sympy and triton, only to tell it to
leave them alone or to ask for one setting. A stand-in answers that; whatever else is asked of it loads the
real module, so that user code which does compile finds everything in place.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_DDP_DEFAULT_MODE = "ddp_optimizer"  # what torch._dynamo.config.optimize_ddp = True comes to


def defer_compiler() -> bool:
    """Let torch._dynamo be loaded by its first real use; returns whether it is out now.

    For processes that do not call torch.compile: what torch keeps out of its traces runs as it is.
    """
    if _NAME in sys.modules:
        return False
    for owner in (torch.optim.Optimizer, torch.nn.parallel.DistributedDataParallel):
        for function in list(vars(owner).values()):
            _mark_as_untraced(function)
    utils = _Deferred(f"{_NAME}.utils", get_optimize_ddp_mode=lambda: _DDP_DEFAULT_MODE)
    torch._dynamo = sys.modules[_NAME] = _Deferred(
        _NAME,
        utils=utils,
        # Outside a trace a graph break is nothing; optimizers ask for two in each step.
        graph_break=lambda: None,
        # A cache that is not there yet; init_process_group clears it.
        trace_rules=_Deferred(f"{_NAME}.trace_rules", clear_lru_cache=lambda: None),
    )
    return True


class _Deferred(ModuleType):
    """Stands where a module will be: answers what is known, and loads the module for anything else."""

    def __init__(self, name: str, **known: Any):
        super().__init__(name)
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        # The import system asks for __path__ to load a submodule; who looks at all modules asks for more.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__], torch._dynamo
        return getattr(importlib.import_module(self.__name__), name)


def _mark_as_untraced(function: Any) -> None:
    """Put the mark where torch would after loading the compiler (see torch/_compile.py)."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if getattr(function, "__code__", None) is _DISABLED_CODE and not hasattr(inner, "__dynamo_disable"):
            vars(inner)["__dynamo_disable"] = inner
        function = inner


def _disabled_code() -> Any:
    """The code that all functions behind torch's own marker share; a torch without it has no need of ours."""
    marker = getattr(torch, "_disable_dynamo", None)
    return getattr(marker(lambda: None), "__code__", None) if marker else None


_DISABLED_CODE = _disabled_code()
