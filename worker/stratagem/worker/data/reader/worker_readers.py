"""All readers of a worker: those of all runs that it has a part in, within the operator's limit."""

from collections import OrderedDict

from stratagem.common.job import JobSpec
from stratagem.worker.data.data_factory import DataFunction
from stratagem.worker.data.reader.reader_messages import ReaderSetup
from stratagem.worker.data.reader.reader_pool import PREFETCH, ReaderPool
from stratagem.worker.user_code import output_capture
from stratagem.worker.user_code.entrypoints import EntryPoints

_Key = tuple[str, str, int, int]


class WorkerReaders:
    """The pools of readers by run and data. Used by one thread."""

    def __init__(self, max_readers: int) -> None:
        self._max_readers = max_readers
        self._pools: OrderedDict[_Key, ReaderPool] = OrderedDict()

    def of(self, run_id: str, job: JobSpec, entrypoints: EntryPoints) -> ReaderPool | None:
        """Returns the readers of a job, which all parts of its run on this worker share; None where
        rows are read without. They are started when they are first used."""
        wanted = job.data.readers or 0
        number = min(wanted, self._max_readers)
        if not number:
            return None
        name, prefetch = job.data.entrypoint, job.data.prefetch or PREFETCH
        assert name is not None  # else there are no readers
        function = DataFunction(name, job.data.kwargs, job.data.collate)
        setup = ReaderSetup(function, job.seed, entrypoints)
        key = (run_id, setup.text(()), number, prefetch)
        if key not in self._pools:
            if number < wanted:
                output_capture.pass_on(
                    "WARNING",
                    f"data.readers: the job asks for {wanted}, this worker allows {number} "
                    "(--max-readers)",
                )
            self._pools[key] = ReaderPool(setup, number, prefetch, self._make_room)
        return self._pools[key]

    def close(self, run_id: str) -> None:
        """Ends the readers of a run."""
        for key in [key for key in self._pools if key[0] == run_id]:
            self._pools.pop(key).stop()

    def _make_room(self, coming: ReaderPool) -> None:
        """Ends readers of other pools, the one that was used first before others, until those that
        are about to start are within the limit."""
        for key, pool in [*self._pools.items()]:
            if pool is coming:
                self._pools.move_to_end(key)
        others = [pool for pool in self._pools.values() if pool is not coming]
        num_running = sum(len(pool.pids) for pool in others)
        for pool in others:
            if num_running + coming.num_readers <= self._max_readers:
                return
            num_running -= len(pool.pids)
            pool.stop()
