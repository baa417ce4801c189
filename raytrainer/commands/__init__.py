"""One module for each group of commands; `raytrainer.cli` puts them together. Heavy imports are inside the
commands.
"""
