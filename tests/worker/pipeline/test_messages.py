"""Messages between stages: their bytes, and what carries them."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    StaleError,
    UnavailableError,
)
from stratagem.common.tensors.torch_codec import bytes_of
from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.pipeline import activation_store
from stratagem.worker.pipeline.activation_store import ActivationStore
from stratagem.worker.pipeline.build import StageAssignment
from stratagem.worker.pipeline.messages import (
    Address,
    LocalPost,
    LocalTransport,
    Message,
    PeerTransport,
    StageTransport,
    pack,
    put_together,
    take_apart,
    unpack,
)
from stratagem.worker.pipeline.store_transport import StoreTransport, open_store
from tests.patience import PATIENCE_S
from tests.reference.loops import sharded_loop
from tests.worker.engine.support import assert_same_bits
from tests.worker.mesh.engines import links_of, slot_links
from tests.worker.pipeline.graphs import SKIPS
from tests.worker.pipeline.s3_server import s3_server, s3_settings
from tests.worker.pipeline.support import ADAM, ALLOWED, Party, cut, deep_job

BASE = torch.arange(60.0).reshape(6, 10)
TENSORS = {
    "contiguous": BASE,
    "transposed": BASE.t(),
    "columns": BASE[:, :3],
    "inside": BASE[1:, 2:5],
    "last column": BASE[:, -1],
    "scalar": torch.tensor(3.5),
    "expanded scalar": torch.tensor(2.0).expand(3, 3),
    "expanded": torch.randn(4, 1, 3).expand(4, 2, 3).transpose(0, 1),
    "empty": torch.zeros(0, 4),
    "one row": BASE[:1],
    "bfloat16": BASE.bfloat16(),
    "float16": BASE.half().t(),
    "float64": BASE.double(),
    "bool": BASE > 7,
    "int64": torch.arange(5),
    "uint8": torch.arange(5, dtype=torch.uint8)[1:],
}


def address(step: int = 1, tag: int = 6, source: int = 0, target: int = 1) -> Address:
    return Address(step, source, target, tag, f"boundary 0, micro-batch {tag // 2}, forward")


def wire(tensor: Tensor) -> memoryview:
    return memoryview(bytearray(bytes_of(tensor)))


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_lay_in_memory(name: str) -> None:
    sent = TENSORS[name]
    (found,) = unpack(address(), wire(pack(address(), Message([sent])))).tensors
    assert torch.equal(sent, found)
    assert (sent.dtype, sent.shape, sent.stride()) == (found.dtype, found.shape, found.stride())
    assert not found.numel() or sent.data_ptr() % 64 == found.data_ptr() % 64


def test_overlapping_windows_arrive_contiguous_and_wide_gaps_too() -> None:
    windows, sparse = BASE.unfold(1, 4, 1), torch.zeros(3, 5000)[:, :1]
    frame = pack(address(), Message([windows, sparse], {"about": [1, "x"]}))
    assert frame.nbytes < 4096
    found = unpack(address(), wire(frame))
    assert torch.equal(found.tensors[0], windows)
    assert torch.equal(found.tensors[1], sparse)
    assert found.words == {"about": [1, "x"]}


@pytest.mark.parametrize("change", [{"step": 2}, {"tag": 8}])
def test_another_message_is_not_taken_for_the_awaited_one(change: dict[str, int]) -> None:
    frame = wire(pack(address(), Message([BASE])))
    with pytest.raises(IntegrityError, match="came instead"):
        unpack(address(**change), frame)


def test_damaged_bytes_are_refused() -> None:
    frame = wire(pack(address(), Message([BASE])))
    for damaged in (frame[:40], memoryview(b"junk" * 30), frame[:-64]):
        with pytest.raises(IntegrityError, match="boundary 0, micro-batch 3, forward of step 1"):
            unpack(address(), damaged)
    for old, new in [(b'"at": 0', b'"at":-8'), (b"[10, 1]", b"[-1, 1]"), (b"float32", b"float3x")]:
        lie = memoryview(bytearray(bytes(frame).replace(old, new)))
        with pytest.raises(IntegrityError):
            unpack(address(), lie)


def test_values_of_any_nesting() -> None:
    value = {"a": (BASE, [1, None, "x"]), "b": torch.tensor(1)}
    found: list[Tensor] = []
    skeleton = take_apart(value, found)
    assert put_together(skeleton, found) == value
    with pytest.raises(InvalidInputError, match="a set passes from one stage to another"):
        take_apart({1, 2}, [])


# ---- all transports ----

Pair = tuple[StageTransport, StageTransport]


@contextmanager
def local(_: Path) -> Iterator[Pair]:
    post = LocalPost(2)
    yield LocalTransport(post, 0), LocalTransport(post, 1)


@contextmanager
def peers(_: Path) -> Iterator[Pair]:
    with links_of("grpc", 2) as links:
        yield PeerTransport(links[0]), PeerTransport(links[1])
        for link in links:
            link.cut()


@contextmanager
def shared(_: Path) -> Iterator[Pair]:
    with slot_links(2) as links:
        yield PeerTransport(links[0]), PeerTransport(links[1])


@contextmanager
def directory(folder: Path) -> Iterator[Pair]:
    url = f"file://{folder}/store"
    ranks = StoreTransport(url, "run/party/1"), StoreTransport(url, "run/party/1")
    yield ranks
    for rank in ranks:
        rank.close()


TRANSPORTS: dict[str, Callable[[Path], Any]] = {
    "memory": local,
    "PeerService": peers,
    "shared memory": shared,
    "directory": directory,
}


@pytest.fixture(params=TRANSPORTS, name="pair")
def _pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with TRANSPORTS[request.param](tmp_path) as pair:
        yield pair


def test_messages_of_two_steps_in_any_order(pair: Pair) -> None:
    first, second = address(tag=0), address(tag=2)
    later = address(step=2, tag=0)
    for each in (second, first, later):  # the last one before its step is opened
        pair[0].send(each, Message([BASE * (each.tag + 10 * each.step)]))
    pair[1].begin(1, [first, second])
    for each in (first, second):
        assert torch.equal(pair[1].recv(each, PATIENCE_S).tensors[0], BASE * (each.tag + 10))
    pair[0].end(PATIENCE_S)
    pair[1].begin(2, [later])
    assert torch.equal(pair[1].recv(later, PATIENCE_S).tensors[0], BASE * 20)


def test_a_deadline_names_the_sender_and_the_tag(pair: Pair) -> None:
    pair[1].begin(1, [address()])
    with pytest.raises(ExchangeError, match=r"nothing within|no run/party") as caught:
        pair[1].recv(address(), 0.05)
    assert re.search("member 0", str(caught.value))
    assert re.search("tag 6", str(caught.value))


def test_a_cut_ends_every_wait(pair: Pair) -> None:
    pair[1].begin(1, [address()])
    threading.Timer(0.05, pair[0].cut).start()
    with pytest.raises(ExchangeError):
        pair[1].recv(address(), PATIENCE_S)


def test_stale_and_repeated_messages_are_refused_in_memory() -> None:
    with local(Path()) as (sender, receiver):
        receiver.begin(2, [])
        with pytest.raises(StaleError, match="member 1 is at a later step"):
            sender.send(address(step=1), Message())
        sender.send(address(step=2), Message())
        with pytest.raises(ExchangeError, match="sent twice"):
            sender.send(address(step=2), Message())
        receiver.recv(address(step=2), PATIENCE_S)
        with pytest.raises(ExchangeError, match="sent twice"):
            sender.send(address(step=2), Message())


@pytest.mark.parametrize(
    ("step", "reason"), [(1, "stale, the receiver is at step 2"), (2, "not awaited, or here twice")]
)
@pytest.mark.parametrize("make", [peers, shared])
def test_stale_and_repeated_messages_end_the_stream_of_a_peer(
    make: Callable[[Path], Any], step: int, reason: str
) -> None:
    with make(Path()) as (sender, receiver):
        receiver.begin(2, [address(step=2), address(step=2, tag=8)])
        sender.send(address(step=2), Message([BASE]))
        receiver.recv(address(step=2), PATIENCE_S)
        sender.send(address(step=step), Message([BASE]))
        with pytest.raises(ExchangeError, match=reason):
            receiver.recv(address(step=2, tag=8), PATIENCE_S)


def test_objects_are_deleted_after_use_and_damage_is_seen(tmp_path: Path) -> None:
    with directory(tmp_path) as (sender, receiver):
        sender.send(address(), Message([BASE]))
        receiver.recv(address(), PATIENCE_S)
        receiver.end(PATIENCE_S)
        sender.send(address(tag=8), Message([BASE]))
        sender.end(PATIENCE_S)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert [path.name for path in files] == ["boundary-0-micro-batch-4-forward"]
        files[0].write_bytes(files[0].read_bytes()[:-70] + b"x" * 70)
        with pytest.raises(IntegrityError, match="the checksum is wrong"):
            receiver.recv(address(tag=8), PATIENCE_S)


def test_the_end_of_a_run_leaves_nothing_of_it_and_all_of_others(tmp_path: Path) -> None:
    store = ActivationStore(f"file://{tmp_path}")
    mine, other = (store.transport(run, "", 1, 0) for run in ("mine", "other"))
    for transport in (mine, other):
        transport.send(address(), Message([BASE]))
        transport.end(PATIENCE_S)
    # What a killed process was writing: a file that no listing of objects names.
    (written,) = (path for path in tmp_path.rglob("boundary*") if "mine" in path.parts)
    written.with_name(f"{written.name}-other#1").write_bytes(b"half")
    store.clear_run("mine")
    for thread in threading.enumerate():
        if thread.name == "activations-sweep":
            thread.join(PATIENCE_S)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    other.close()


def test_a_store_that_refuses_is_seen_by_the_writer_and_the_reader() -> None:
    settings = s3_settings("http://127.0.0.1:9") | {"retry_config": {"max_retries": 0}}
    transport = StoreTransport("s3://bucket", "run", settings)
    transport.send(address(), Message())
    with pytest.raises(UnavailableError, match="the object store refuses"):
        transport.end(PATIENCE_S)
    with pytest.raises(UnavailableError, match="object store: run/1/"):
        transport.recv(address(), PATIENCE_S)
    transport.close()
    with pytest.raises(InvalidInputError, match=r"neither file:///… nor s3://…"):
        open_store("http://somewhere", {})
    with pytest.raises(InvalidInputError, match=r"data_store: .*prefix to start with aws_"):
        open_store("s3://bucket", {"allow_http": True})


def test_a_store_that_does_not_answer_is_no_wrong_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A party is formed again without its worker while the store is away, not refused for good."""
    monkeypatch.setattr(activation_store, "RETRY", {"max_retries": 0})
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
        patch.setenv("AWS_ALLOW_HTTP", "true")
        for name in ("AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "x")
        with pytest.raises(UnavailableError, match="s3://bucket: "):
            ActivationStore("s3://bucket").check("w0")
    (tmp_path / "a-file").touch()
    with pytest.raises(InvalidInputError, match=r"activation_store: file:.*a-file"):
        ActivationStore(f"file://{tmp_path}/a-file").check("w0")


# ---- whole steps ----


@pytest.mark.parametrize("make", [peers, shared])
def test_a_stage_that_leaves_is_named_and_the_step_leaves_no_trace(
    make: Callable[[Path], Any],
) -> None:
    placement = StageAssignment(cut([str(i) for i in range(8)], 3, 5), (0, 1), 2)
    with make(Path()) as transports:
        party = Party(deep_job(optimizer=ADAM), placement, transports)
        party.train(1)
        first, before = party.runners[0], party.runners[0].fingerprint()
        transports[1].cut()
        with pytest.raises(ExchangeError, match="member 1"):
            party.each(lambda runner: runner.train_step() if runner is first else None)
        assert (first.step, first.fingerprint()) == (1, before)


def test_pipelines_through_shared_memory() -> None:
    with ExitStack() as stack:

        def make(size: int) -> list[StageTransport]:
            return [PeerTransport(link) for link in stack.enter_context(slot_links(size))]

        assert_trains_exactly(make)


def assert_trains_exactly(make: Callable[[int], list[StageTransport]]) -> None:
    deep = deep_job(optimizer=ADAM)
    placement = StageAssignment(cut([str(i) for i in range(8)], 3, 2, 3), (0, 1, 2), 3)
    party = Party(deep, placement, make(3))
    assert party.train(4) == sharded_loop(deep, ALLOWED, 1, 4, micro_batch_size=3).losses
    skips = deep_job({"graph": SKIPS})
    placement = StageAssignment(
        (("a", "t", "b"), ("c", "d", "sum"), ("e", "all", "head")), (0, 1, 2)
    )
    party = Party(skips, placement, make(3))
    losses = party.train(3)
    expected = sharded_loop(skips, ALLOWED, 1, 3)
    assert losses == expected.losses
    assert_same_bits(party.model(), dict(expected.state))
    assert [part.batch for part in party.each(lambda r: r.evaluate_split("test"))[2]] == [0]


def test_pipelines_through_a_directory(tmp_path: Path) -> None:
    parties = iter(range(9))

    def make(size: int) -> list[StageTransport]:
        prefix = f"run/{next(parties)}"
        return [StoreTransport(f"file://{tmp_path}", prefix) for _ in range(size)]

    assert_trains_exactly(make)
    deadline_s = time.monotonic() + PATIENCE_S
    while [path for path in tmp_path.rglob("*") if path.is_file()]:  # the last deletes
        assert time.monotonic() < deadline_s


@pytest.mark.sweep  # tests.cluster.test_activation_store has one of workers
def test_pipelines_through_s3() -> None:
    with s3_server("activations") as endpoint:
        s3 = s3_settings(endpoint)
        stores: list[StoreTransport] = []

        def make(size: int) -> list[StageTransport]:
            prefix = f"run/{len(stores)}"
            made = [StoreTransport("s3://activations/folder", prefix, s3) for _ in range(size)]
            stores.extend(made)
            return list(made)

        assert_trains_exactly(make)
        for store in stores:
            store.close()
        assert not [each for page in open_store("s3://activations", s3).list() for each in page]
