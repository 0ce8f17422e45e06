"""How a job's model is computed: compiled or not, in which precision, with which activations kept.

`prepare` puts the settings of `execution` onto a model that has just been built; the engine then
calls the model as before.
"""
