"""Runs a file of its own folder by its relative name, as notebooks turned into scripts do."""

import os

exec(open("part.py").read())  # noqa: SIM115
with open(f"exec_{os.environ['RANK']}.json", "w") as file:
    file.write(f'{{"part": "{PART}"}}')  # noqa: F821 - from part.py
