"""The step history keeps values of each step of a run, in rows that stand for one step or several.

Every number in a row was reported, and none is an average. The package depends on neither torch,
the network nor a clock.

- series: the values of one name over the steps, such as "train.loss"
- bucket: the steps that one row may stand for; stride: their number
- observed: dependent on clocks and machines, so different in two runs of the same job
"""

from stratagem.common.history.columns import Columns, clipped, joined, shortened, stride_of
from stratagem.common.history.recording import Recorder, Series

__all__ = ["Columns", "Recorder", "Series", "clipped", "joined", "shortened", "stride_of"]
