"""Packing trials on cards: what decides, as pure functions, and what is kept of each trial.

Imports neither torch nor ray. The processes are started by `raytrainer.cluster.pack`.
"""
