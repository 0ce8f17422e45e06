"""Settings that follow from the place which a launcher gave this process.

Reads what the pure `launch_place` needs of this host: its environment, its name, its cores and its
CUDA devices, and the address from which it reaches the coordinator.
"""

import os
import socket
from typing import Any, get_args

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.text import split_address
from stratagem.common.process.cpu_threads import available_cores, threads_told
from stratagem.common.rpc.channel import split_addresses
from stratagem.worker.process.launch_place import (
    COORDINATOR,
    Launcher,
    coordinator_of,
    cores_at,
    detect,
    device_at,
)


def with_place(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings with those added that a launcher's variables tell and nobody has set.

    Raises ValueError where the variables do not tell a place; it names the variable.
    """
    if values["rendezvous"] not in get_args(Launcher):
        return values  # refused with the other wrong values
    place = detect(values["rendezvous"], os.environ, socket.gethostname(), os.getpid())
    num_cores = cores_at(place, os.environ, available_cores())
    by_environment = threads_told(os.environ)
    told: dict[str, Any] = {
        "name": place.name,
        "threads": num_cores if by_environment is None else by_environment.number,
        "max_readers": num_cores,
        "ephemeral": True,
    }
    if "device" not in values:
        told["device"] = device_at(place, _num_cuda_devices())
    coordinator = values.get("coordinator") or coordinator_of(os.environ)
    if not coordinator:
        problem = f"neither {COORDINATOR} nor MASTER_ADDR of the environment tells where it is"
        raise InvalidInputError.at("--coordinator", problem)
    told["coordinator"] = coordinator
    if "listen" not in values and not values.get("tunnel") and coordinator != "-":
        told["listen"] = _own_address_towards(split_addresses(coordinator)[0])
    return told | {name: value for name, value in values.items() if value is not None}


def _num_cuda_devices() -> int:
    import torch  # only here: other users of the settings have no need of it

    return torch.cuda.device_count()


def _own_address_towards(coordinator: str) -> str:
    """Return the address of this host from which packets to the coordinator go, with a free port.

    Connecting a UDP socket sends nothing.
    """
    host, port = split_address(coordinator)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except OSError as error:
        problem = f"{host} is not known from here: {error}; say --listen HOST:PORT to start anyway"
        raise InvalidInputError.at("--coordinator", problem) from None
    return f"[{own}]:0" if ":" in own else f"{own}:0"
