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
    utils = _Deferred(
        f"{_NAME}.utils",
        get_optimize_ddp_mode=lambda: _DDP_DEFAULT_MODE,
        # Imported by torchvision, which torchmetrics imports; called for some operators only.
        is_compile_supported=lambda device_type: _load(f"{_NAME}.utils").is_compile_supported(device_type),
    )
    torch._dynamo = _Deferred(
        _NAME,
        utils=utils,
        # Outside a trace a graph break is nothing; optimizers ask for two in each step.
        graph_break=lambda: None,
        # A cache that is not there yet; init_process_group clears it.
        trace_rules=_Deferred(f"{_NAME}.trace_rules", clear_lru_cache=lambda: None),
    )
    sys.modules.update({_NAME: torch._dynamo, utils.__name__: utils})
    return True


class _Deferred(ModuleType):
    """Stands where a module will be: answers what is known, and loads the module for anything else."""

    def __init__(self, name: str, **known: Any):
        super().__init__(name)
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        # The import system asks a package for its __path__; who looks at all modules asks for more.
        if name.startswith("__") and not (name == "__path__" and self.__name__ == _NAME):
            raise AttributeError(name)
        return getattr(_load(self.__name__), name)


def _load(name: str) -> ModuleType:
    """The real module `name`; from here on no stand-in is found any more."""
    if isinstance(vars(torch).get("_dynamo"), _Deferred):
        del torch._dynamo
    for known in (_NAME, f"{_NAME}.utils"):
        if isinstance(sys.modules.get(known), _Deferred):
            del sys.modules[known]
    return importlib.import_module(name)


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
