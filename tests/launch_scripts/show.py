"""Writes what it was given: arguments, paths, environment. Arguments: a folder, then anything."""

import json
import os
import sys

NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)
FREE = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")
# Ours serves no store itself.
FREE += ("TORCHELASTIC_USE_AGENT_STORE",)

if __name__ == "__main__":
    import beside

    seen = {
        "argv": sys.argv,
        "path": sys.path[0],
        "cwd": os.getcwd(),
        "name": __name__,
        "file": __file__,
        "prefix": sys.prefix,
        "unbuffered": sys.stdout.write_through or os.environ.get("PYTHONUNBUFFERED"),
        "beside": beside.VALUE,
        "env": {name: os.environ.get(name) for name in NAMES},
        "given": {name: bool(os.environ.get(name)) for name in FREE},
    }
    folder = sys.argv[1]
    with open(f"{folder}/show_{os.environ.get('RANK', 'none')}.json", "w") as file:
        json.dump(seen, file)
