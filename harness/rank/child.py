"""What runs inside a rank process that harness.launch started, and the frames both sides speak.

A rank reads what to run from its socket, runs it, and says how it ended. It never outlives its
launcher: the kernel kills it with the thread that started it, and so does the end of its socket.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvpact.consensus.core.errors import InternalError, Misuse, RankStalled

__all__ = [
    "Frame",
    "Raised",
    "RankContext",
    "Returned",
    "Said",
    "Start",
    "Unpacker",
    "pack",
    "run_rank",
]

#: Messages from the launcher that the rank has not taken yet; then the launcher has to wait.
MAX_RECEIVED = 10_000
MAX_FRAME_BYTES = 64 << 20

_LENGTH = struct.Struct(">I")
_PR_SET_PDEATHSIG = 1


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first frame: what a rank is to run."""

    target: str
    rank: int
    num_ranks: int
    host: str
    port: int
    args: Any


class Said(msgspec.Struct, frozen=True, tag="said"):
    """One message, in either direction."""

    body: Any


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The last frame of a rank whose function returned."""

    result: Any


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """The last frame of a rank whose function raised.

    ``error`` is pickled, or empty where it cannot be; ``text`` is the traceback.
    """

    error: bytes
    text: str


Frame = Start | Said | Returned | Raised
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def pack(frame: Frame) -> bytes:
    """The bytes of one frame; :class:`Misuse` above MAX_FRAME_BYTES."""
    body = msgspec.msgpack.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise Misuse(f"a message has at most {MAX_FRAME_BYTES} bytes, got {len(body)}")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Takes bytes in any pieces, gives whole frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next bytes; returns the frames that they complete."""
        self._bytes += data
        frames: list[Frame] = []
        while len(self._bytes) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._bytes)
            end = _LENGTH.size + size
            if len(self._bytes) < end:
                break
            frames.append(_decoder.decode(bytes(self._bytes[_LENGTH.size : end])))
            del self._bytes[:end]
        return frames


# ----------------------------------------------------------------------------- inside a rank


class RankContext:
    """What a rank's function gets: who it is, where the store is, how to talk to the launcher."""

    def __init__(self, start: Start, sock: socket.socket) -> None:
        self.rank = start.rank
        self.num_ranks = start.num_ranks
        self.store_host = start.host
        self.store_port = start.port
        self._socket = sock
        self._sending = threading.Lock()
        self._received: queue.Queue[Any] = queue.Queue(MAX_RECEIVED)

    def send(self, message: Any) -> None:
        """Stream one message (anything msgpack can carry) to the launcher.

        Blocks while the launcher takes nothing and the socket is full.
        """
        self.write(pack(Said(message)))

    def receive(self, timeout_s: float) -> Any:
        """The next message from the launcher; :class:`RankStalled` after ``timeout_s``."""
        try:
            return self._received.get(timeout=timeout_s)
        except queue.Empty:
            raise RankStalled(f"the launcher sent nothing for {timeout_s:g} s") from None

    def write(self, data: bytes) -> None:
        """Send bytes of :func:`pack`; any thread may."""
        with self._sending:
            self._socket.sendall(data)

    def take(self, frames: Iterable[Frame]) -> None:
        """Keep the messages among ``frames`` for :meth:`receive`."""
        for frame in frames:
            if isinstance(frame, Said):
                self._received.put(frame.body)


def _receive_or_end(sock: socket.socket) -> bytes:
    """The next bytes from the launcher; without a launcher this process ends at once."""
    try:
        data = sock.recv(1 << 16)
    except OSError:
        data = b""
    if not data:
        os.kill(os.getpid(), signal.SIGKILL)
    return data


def end_with(parent_pid: int) -> None:
    """Have the kernel kill this process when the launcher's thread ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def run_rank(fd: int, parent_pid: int) -> None:
    """The whole life of a rank process: read what to run, run it, say how it ended."""
    end_with(parent_pid)
    # A rank that is asked to end says first where it was.
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    unpacker = Unpacker()
    frames: list[Frame] = []
    while not frames:
        frames = unpacker.feed(_receive_or_end(sock))
    start = frames[0]
    if not isinstance(start, Start):
        raise InternalError(f"a rank must first be told what to run, got {start}")
    context = RankContext(start, sock)
    context.take(frames[1:])

    def listen() -> None:
        while True:
            context.take(unpacker.feed(_receive_or_end(sock)))

    threading.Thread(target=listen, name="kvpact-launcher", daemon=True).start()
    try:
        data = pack(Returned(_find(start.target)(context, start.args)))
    except BaseException as error:  # noqa: BLE001  carried over to the launcher
        text = traceback.format_exc()
        sys.stderr.write(text)
        data = pack(Raised(_pickled(error), text))
    context.write(data)


def _find(target: str) -> Callable[[RankContext, Any], Any]:
    module, _, name = target.partition(":")
    function: Callable[[RankContext, Any], Any] = getattr(importlib.import_module(module), name)
    return function


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # noqa: S301  our own bytes: many errors pickle but do not come back
    except Exception:  # noqa: BLE001  whatever a foreign error does when it is pickled
        return b""
    return data
