"""Answers queries about workers: page by page, since there may be thousands."""

from collections.abc import Sequence
from heapq import nsmallest
from typing import Final

from stratagem.common.base.ids import check_worker_id
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.state import WorkerRecord
from stratagem.coordinator.service.protobuf_views import worker_infos
from stratagem.v1 import coordinator_pb2 as pb

MAX_PAGE_SIZE: Final = 500
"""Workers that are made into one answer: other calls wait for so long."""
MAX_PAGE_BYTES: Final = 2 * 2**20
"""Size of a page with several workers."""


def page(app: App, page_token: str, page_size: int) -> pb.ListWorkersResponse:
    """Return the workers behind the token, by name: at most page_size, or without one all of them.

    The token is the name of the last worker of a page, who may be gone when the next one is asked
    for.
    """
    if page_token:
        check_worker_id(page_token)
    state, limit = app.loop.state, min(page_size, MAX_PAGE_SIZE)
    found = _behind(list(state.workers.values()), page_token, limit)
    refused = () if page_token else app.refusals.messages()
    response, num_bytes = pb.ListWorkersResponse(refused=refused), 0
    for info in worker_infos(state, found, app.silent_s):
        num_bytes += info.ByteSize()
        if limit and response.workers and num_bytes > MAX_PAGE_BYTES:
            break
        response.workers.append(info)
    are_more = len(response.workers) < len(found) or (limit and len(found) == limit)
    if are_more and response.workers:
        response.next_page_token = response.workers[-1].worker_id
    return response


def _behind(workers: Sequence[WorkerRecord], token: str, limit: int) -> list[WorkerRecord]:
    """Return the first workers behind a name, in order; limit: 0 for all."""
    behind = [worker for worker in workers if worker.member.worker_id > token]
    num_wanted = limit or len(behind)
    return nsmallest(num_wanted, behind, key=lambda worker: worker.member.worker_id)
