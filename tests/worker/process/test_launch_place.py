"""The place of a process among those of its launcher, from the variables that launchers set."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import check_worker_id
from stratagem.worker.process.launch_place import (
    Launcher,
    Place,
    coordinator_of,
    cores_at,
    detect,
    device_at,
)

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "f3a1",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1.site",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "10",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "3", "POD_NAME": "train-3-x7k2p"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}

PLACES: list[tuple[Launcher, Mapping[str, str], Place]] = [
    ("torchrun", TORCHRUN, Place("torchrun", "torchrun-f3a1-2-5", 5, 1, 4)),
    ("slurm", SLURM, Place("slurm", "slurm-77-0-9", 9, 1, 2)),
    ("kubernetes", KUBERNETES, Place("kubernetes", "train-3-x7k2p", 3, 0, 1)),
    ("mpi", OPEN_MPI, Place("mpi", "mpi-n1-site-42", 1, 1, 2)),
    ("mpi", MPICH, Place("mpi", "mpi-n1-site-42", 1, 0, 1)),
    ("env", PLAIN, Place("env", "env-n1-site-42", 1, 0, 1)),
]


def place(wanted: Launcher, environ: Mapping[str, str]) -> Place:
    return detect(wanted, environ, "n1.site", 42)


@pytest.mark.parametrize(("launcher", "environ", "expected"), PLACES)
def test_a_launcher_is_found(
    launcher: Launcher, environ: Mapping[str, str], expected: Place
) -> None:
    assert place(launcher, environ) == expected
    assert place("env", environ) == expected
    # Torchrun counts where another launcher has started it.
    assert place("env", {**SLURM, **KUBERNETES, **OPEN_MPI, **TORCHRUN}).launcher == "torchrun"


WRONG: list[tuple[Launcher, Mapping[str, str], str]] = [
    ("env", {}, "no launcher has set its variables: TORCHELASTIC_RUN_ID and RANK"),
    ("torchrun", {}, "RANK is not set"),
    ("torchrun", TORCHRUN | {"TORCHELASTIC_RUN_ID": ""}, "TORCHELASTIC_RUN_ID is not set"),
    ("torchrun", TORCHRUN | {"RANK": "-1"}, "RANK is '-1', which is not a whole number"),
    ("torchrun", TORCHRUN | {"RANK": "8"}, "RANK is '8', which is not below WORLD_SIZE, which is"),
    ("torchrun", TORCHRUN | {"LOCAL_RANK": "4"}, "not below LOCAL_WORLD_SIZE, which is 4"),
    ("torchrun", TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT is"),
    ("slurm", {"SLURM_STEP_ID": "0"}, "SLURM_PROCID is not set"),
    ("slurm", SLURM | {"SLURM_PROCID": "1.0"}, "SLURM_PROCID is '1.0'"),
    ("slurm", SLURM | {"SLURM_NODEID": "3"}, r"SLURM_NODEID is '3', which has no entry"),
    ("slurm", SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4x2"}, 'which is not like "4'),
    ("kubernetes", {"JOB_COMPLETION_INDEX": "first"}, "JOB_COMPLETION_INDEX is 'first'"),
    ("mpi", {}, "PMI_RANK is not set"),
    ("mpi", OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "is not below OMPI_COMM_WORLD_SIZE"),
]


@pytest.mark.parametrize(("launcher", "environ", "problem"), WRONG)
def test_the_variable_is_named(
    launcher: Launcher, environ: Mapping[str, str], problem: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"--rendezvous.*{problem}"):
        place(launcher, environ)


@settings(max_examples=30)
@given(st.text(min_size=1, max_size=200), st.integers(0, 10**8))
def test_every_name_is_one_of_a_worker_and_of_a_pool(host: str, pid: int) -> None:
    name = detect("mpi", OPEN_MPI, host, pid).name
    assert check_worker_id(name) == name
    assert "." not in name


def test_names_stay_different() -> None:
    """Long ones, one that starts again, and runs of torchrun without an id by where they meet."""
    assert len({detect("mpi", OPEN_MPI, "h" * 70, pid).name for pid in range(100)}) == 100
    assert place("slurm", SLURM | {"SLURM_RESTART_COUNT": "3"}).name == "slurm-77-3-9"
    name = place("torchrun", TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).name
    assert name == "torchrun-n1-site-29500-2-5"
    assert place("kubernetes", {"JOB_COMPLETION_INDEX": "0"}).name == "n1-site"


def test_the_coordinator_is_not_where_the_launcher_listens() -> None:
    for environ, expected in (
        ({}, ""),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, "n1:7070"),
        ({"MASTER_ADDR": "fe80::1"}, "[fe80::1]:7070"),
        ({"STRATAGEM_COORDINATOR": "c:1,d:2", "MASTER_ADDR": "n1"}, "c:1,d:2"),
    ):
        assert coordinator_of(environ) == expected


def test_each_process_has_a_device() -> None:
    for num_visible, rank, device in (
        (0, 3, "cpu"),
        (4, 3, "cuda:3"),
        (1, 0, "cuda:0"),
        (1, 3, "cuda:0"),
    ):
        assert device_at(Place("env", "w", rank, rank, 4), num_visible) == device
    with pytest.raises(InvalidInputError, match="process 3 of this host has none of its 2 CUDA"):
        device_at(Place("env", "w", 3, 3, 4), 2)


@pytest.mark.parametrize(
    ("launcher", "environ", "num_cores", "share"),
    [
        ("torchrun", TORCHRUN, 10, 2),
        ("torchrun", TORCHRUN, 2, 1),
        ("slurm", SLURM, 12, 6),
        ("slurm", SLURM | {"SLURM_CPUS_ON_NODE": "8"}, 12, 4),
        ("slurm", SLURM | {"SLURM_CPUS_ON_NODE": "8"}, 4, 4),
        ("slurm", SLURM | {"SLURM_CPUS_PER_TASK": "3"}, 12, 3),
        ("slurm", SLURM | {"SLURM_CPUS_PER_TASK": "3"}, 2, 2),
        ("kubernetes", KUBERNETES, 7, 7),
    ],
)
def test_the_processes_of_a_host_share_its_cores(
    launcher: Launcher, environ: Mapping[str, str], num_cores: int, share: int
) -> None:
    assert cores_at(place(launcher, environ), environ, num_cores) == share
