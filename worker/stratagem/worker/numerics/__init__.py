"""Execution settings of a job's model: compilation, precision, and activation checkpointing.

`prepare` puts the settings of `execution` onto a model that has just been built; the engine then
calls the model as before.
"""
