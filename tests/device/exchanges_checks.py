"""Checks of exchanges between processes whose tensors are on the device."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from stratagem.worker.exchange import ExchangeError, GradientReducer, mesh_exchange
from stratagem.worker.mesh import Link
from stratagem.worker.mesh.shm import SharedGroup
from stratagem.worker.mesh.torch_links import connect_nccl, serve_nccl
from tests.device.check_table import SkippedError
from tests.patience import PATIENCE_S
from tests.worker.exchange.cases import Case, no_scalars, one_step
from tests.worker.mesh.engines import Former, former, num_meetings
from tests.worker.mesh.party import Member, introduce, party, rendezvous_over

NUM_FORMED = 20
DEADLINE_S = 5.0
CASE = Case(4, 4, sizes=(0, 1, 7, 100_003), divisor=3.0)
BUS_SIZES = (16 * 2**20,)
BUS_ROUNDS = 10
LEAST_BUS = 0.7


def engines_of(device: torch.device) -> list[tuple[str, list[str]]]:
    """(engine, device of each member), as workers on this machine would choose."""
    if device.type == "cpu":
        return [("shm", ["cpu"] * 3), ("gloo", ["cpu"] * 3), ("grpc", ["cpu"] * 3)]
    shared = [("grpc", [str(device)] * 3)]
    num_devices = torch.cuda.device_count()
    if num_devices < 2:
        return shared
    return [("nccl", [f"cuda:{number}" for number in range(min(4, num_devices))]), *shared]


def form(
    pipe: Connection, members: Former, engine: str, rank: int, devices: list[str]
) -> Link | SharedGroup:
    if engine != "nccl":
        return members.form(engine, rank, len(devices))
    torch.cuda.set_device(torch.device(devices[rank]))
    served = serve_nccl("127.0.0.1", PATIENCE_S) if rank == 0 else None
    own = b"" if served is None else f"127.0.0.1:{served.port}".encode()
    address = rendezvous_over(pipe)(own)[0].decode()
    return connect_nccl(served, rank, len(devices), address, PATIENCE_S)


# ---- members ----


def follow_orders(pipe: Connection, _rank: int, _size: int) -> None:
    """Forms one group after the other: (engine, rank, devices, step, deed, deadline)."""
    with former(pipe) as members:
        while True:
            engine, rank, devices, step, deed, deadline_s = pipe.recv()
            case = replace(CASE, device=devices[rank])
            case.configure()
            params, buckets = case.make_buckets()
            link = form(pipe, members, engine, rank, devices)
            pipe.send("formed")
            exchange = mesh_exchange(buckets, link, case.num_shards, deadline_s=deadline_s)
            try:
                if deed == "linger":
                    exchange.begin_step(step, exchange.party.owned, case.num_live)
                    pipe.send("inside")
                    pipe.recv()  # is killed, or stands still
                pipe.send(one_step(exchange, params, case, step) == case.expected(step))
            except ExchangeError as error:
                pipe.send(str(error))
            exchange.cut()
            exchange.close()


def order(
    members: list[Member],
    engine: str,
    devices: list[str],
    step: int,
    deeds: list[str],
    deadline_s: float = PATIENCE_S,
) -> None:
    for rank, (member, deed) in enumerate(zip(members, deeds, strict=True)):
        member.pipe.send((engine, rank, devices, step, deed, deadline_s))
    for _ in range(num_meetings(engine)):
        introduce(members)
    # A member that is lost before all have their links ends the forming, and not a step.
    assert [member.receive() for member in members] == ["formed"] * len(members)


def groups(device: torch.device) -> str:
    told = []
    for engine, devices in engines_of(device):
        with party(follow_orders, len(devices)) as members:
            begun_s = time.perf_counter()
            for step in range(1, NUM_FORMED + 1):
                order(members, engine, devices, step, ["sum"] * len(devices))
                assert [member.receive() for member in members] == [True] * len(devices), engine
            each_ms = 1e3 * (time.perf_counter() - begun_s) / NUM_FORMED
        told.append(f"{engine} {each_ms:.0f} ms each")
    return ", ".join(told)


def killed_member(device: torch.device) -> str:
    return lost_member(device, Member.kill, PATIENCE_S)


def frozen_member(device: torch.device) -> str:
    return lost_member(device, Member.freeze, DEADLINE_S)


def lost_member(device: torch.device, lose: Callable[[Member], None], deadline_s: float) -> str:
    """The last member is lost inside a step; the others say so, and do the step among them."""
    told = []
    for engine, devices in engines_of(device):
        last = len(devices) - 1
        with party(follow_orders, len(devices)) as members:
            deeds = ["sum"] * last + ["linger"]
            order(members, engine, devices, 1, deeds, deadline_s)
            assert members[last].receive() == "inside"
            lose(members[last])
            begun_s = time.perf_counter()
            errors = [member.receive() for member in members[:last]]
            seen_s = time.perf_counter() - begun_s
            assert all(isinstance(error, str) for error in errors), (engine, errors)
            order(members[:last], engine, devices[:last], 1, ["sum"] * last)
            assert [member.receive() for member in members[:last]] == [True] * last, engine
        told.append(f"{engine} seen after {seen_s:.1f} s")
    return ", ".join(told)


# ---- bandwidth ----


def measure_bus(pipe: Connection, rank: int, size: int, engine: str, devices: list[str]) -> None:
    """Sends the seconds of each round: of the exchange, and of the engine's own all-reduce."""
    case = Case(size, size, sizes=BUS_SIZES, device=devices[rank])
    params, buckets = case.make_buckets()
    gradient = torch.ones(case.sizes[0], device=case.device)
    raw = torch.ones(case.sizes[0], device=case.device)
    with former(pipe) as members:
        link = form(pipe, members, engine, rank, devices)
        exchange = mesh_exchange(buckets, link, size)
        group = raw_group(pipe, rank, size, case.device)
        times: dict[str, list[float]] = {"exchange": [], "raw": []}
        for step in range(1, BUS_ROUNDS + 1):
            ready(group, case.device)
            begun_s = time.perf_counter()
            exchange_once(exchange, params, gradient, step)
            synchronize(case.device)
            times["exchange"].append(time.perf_counter() - begun_s)
            ready(group, case.device)
            begun_s = time.perf_counter()
            group.allreduce([raw]).wait()
            synchronize(case.device)
            times["raw"].append(time.perf_counter() - begun_s)
        pipe.send(times)
        pipe.recv()  # the group stays until all have measured
        exchange.close()


def raw_group(pipe: Connection, rank: int, size: int, device: str) -> Any:
    """A process group of torch, of the engine for this device."""
    wait = timedelta(seconds=PATIENCE_S)
    served = serve_nccl("127.0.0.1", PATIENCE_S) if rank == 0 else None
    own = b"" if served is None else f"127.0.0.1:{served.port}".encode()
    host, port = rendezvous_over(pipe)(own)[0].decode().rsplit(":", 1)
    store = served or TCPStore(host, int(port), is_master=False, timeout=wait)
    if torch.device(device).type == "cuda":
        return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    return dist.ProcessGroupGloo(store, rank, size, wait)


def exchange_once(
    exchange: GradientReducer, params: list[torch.nn.Parameter], gradient: torch.Tensor, step: int
) -> None:
    """One step over gradients that are there already."""
    owned = exchange.party.owned
    exchange.begin_step(step, owned, len(owned) * exchange.party.size, divisor=None)
    for shard in owned:
        exchange.begin_shard(shard)
        (params[0] * gradient).sum().backward()
        exchange.end_shard(shard, no_scalars(exchange.buckets))
    exchange.finish()


def ready(group: Any, device: str) -> None:
    """All members have come so far."""
    group.allreduce([torch.zeros(1, device=device)]).wait()
    synchronize(device)


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(torch.device(device))


def bandwidth(device: torch.device) -> str:
    """With backward in it, where the exchange is; on a CPU no ratio is a failure."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        raise SkippedError("one device; nccl takes one for each member")
    engine, devices = ("gloo", ["cpu"] * 2) if device.type == "cpu" else engines_of(device)[0]
    with party(measure_bus, len(devices), engine, devices) as members:
        for _ in range(num_meetings(engine) + 1):
            introduce(members)
        measured = [member.receive() for member in members]
        for member in members:
            member.pipe.send("done")
    seconds = {
        name: statistics.median(map(max, zip(*(each[name] for each in measured), strict=True)))
        for name in ("exchange", "raw")
    }
    ratio = seconds["raw"] / seconds["exchange"]
    size = 4 * BUS_SIZES[0]
    bus = 2 * (len(devices) - 1) / len(devices) * size / seconds["exchange"] / 1e9
    told = f"{engine} of {len(devices)}: {bus:.2f} GB/s, {ratio:.2f} of its all-reduce"
    assert device.type == "cpu" or ratio >= LEAST_BUS, told
    return told
