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
            self._pools[key] = ReaderPool(setup, number, prefetch, self._room_for)
        return self._pools[key]

    def close(self, run_id: str) -> None:
        """Ends the readers of a run."""
        for key in [key for key in self._pools if key[0] == run_id]:
            self._pools.pop(key).stop()

    def _room_for(self, coming: ReaderPool) -> int:
        """Returns how many readers a pool may have now. Pools share them: one that comes later
        takes from the one that has the most, and leaves it one at least. A pool for which there
        is none reads without; ending the readers of others would be to start them again and
        again, as all of them are at work in turn."""
        others = [pool for pool in self._pools.values() if pool is not coming]
        free = self._max_readers - sum(len(pool.pids) for pool in others)
        while free < coming.num_readers and others:
            largest = max(others, key=lambda pool: len(pool.pids))
            if len(largest.pids) <= max(free, 0) + 1:
                break
            largest.shrink(len(largest.pids) - 1)
            free += 1
        return max(min(free, coming.num_readers), len(coming.pids))
