"""How a job's model is computed: compiled or not, in which precision, with which activations kept.

`prepare` puts the settings of `execution` onto a model that has just been built; the engine then
calls the model as before.
"""

from stratagem.worker.engine.execution.memory import give_back, make_gather
from stratagem.worker.engine.execution.precision import LossScale
from stratagem.worker.engine.execution.prepare import Execution, plainly, prepare

__all__ = ["Execution", "LossScale", "give_back", "make_gather", "plainly", "prepare"]
