"""Order between streams: a tensor may be used in another one after a wait only, and memory that was given
back used again when its stream comes after all that have used it, or was told of them (``record_stream``).

torch's own tracing tells of events and waits. Each stream has a clock: the last number of every stream that
comes before what it does next. (torch's own sanitizer does likewise, for each view of a tensor by itself, and
does not know record_stream.)
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.cuda import _gpu_trace as trace

Clock = dict[int, int]
"""Of the streams that something has run in, the last number that is known to be done."""


@dataclass
class _Memory:
    home: int
    """The stream it was taken in."""
    write: tuple[int, int] | None = None
    """(stream, number) of the last one; of each stream's last use likewise."""
    uses: dict[int, int] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    size: int = 0
    """Bytes; 0 before its first use."""


@dataclass(frozen=True)
class _Freed:
    """Memory that was given back while other streams may have been at work on it."""

    begin: int
    end: int
    home: int
    uses: Clock
    where: str


class Streams:
    """find: is told what is wrong. where: which line of the project is at work."""

    def __init__(self, find: Callable[[str], None], where: Callable[[], str]) -> None:
        self._find = find
        self._where = where
        self._number = 0
        self._memory: dict[int, _Memory] = {}
        self._clocks: dict[int, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._host: Clock = {}
        self._freed: list[_Freed] = []
        torch._C._activate_gpu_trace()
        trace.register_callback_for_event_record(self._recorded)
        trace.register_callback_for_event_wait(
            lambda event, stream: _join(self._clock(stream), self._events.get(event, {}))
        )
        trace.register_callback_for_device_synchronization(
            lambda: [self._host_waits(c) for c in self._clocks.values()]
        )
        trace.register_callback_for_stream_synchronization(
            lambda stream: self._host_waits(self._clock(stream))
        )
        trace.register_callback_for_event_synchronization(
            lambda event: self._host_waits(self._events.get(event, {}))
        )
        trace.register_callback_for_memory_allocation(self._taken)
        trace.register_callback_for_memory_deallocation(self._given_back)

    def used(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor]) -> None:
        """An operator was launched in the current stream."""
        if func is torch.ops.aten.record_stream.default:
            told = torch.cuda.Stream(
                stream_id=args[1].stream_id,
                device_index=args[1].device_index,
                device_type=args[1].device_type,
            )
            self._of(args[0], told.cuda_stream).told.add(told.cuda_stream)
            return
        now = torch.cuda.current_stream().cuda_stream
        self._number += 1
        clock = self._clock(now)
        _join(clock, self._host)
        clock[now] = self._number
        written = {_address(tensor) for tensor in made} | _written(func, args, kwargs)
        for tensor in {_address(t): t for t in [*given, *made] if t.is_cuda and t.nbytes}.values():
            self._use(func, tensor, now, _address(tensor) in written)

    def _use(self, func: Any, tensor: Tensor, now: int, writes: bool) -> None:
        memory, address, size = self._of(tensor, now), _address(tensor), tensor.untyped_storage().nbytes()
        others = memory.uses.items() if writes else [memory.write] if memory.write else []
        for stream, number in others:
            if number > self._clocks[now].get(stream, 0):
                self._find(f"{func} uses memory that another stream is at work on, without waiting for it")
                break
        if not memory.size:
            memory.size = size
            self._taken_again(func, address, size, now)
        memory.uses[now] = self._number
        if now != memory.home and not self._where():  # torch's futures tell the allocator without an operator
            memory.told.add(now)
        if writes:
            memory.write = (now, self._number)

    def _clock(self, stream: int) -> Clock:
        return self._clocks.setdefault(stream, {})

    def _recorded(self, event: int, stream: int) -> None:
        self._events[event] = dict(self._clock(stream))

    def _host_waits(self, done: Clock) -> None:
        """What it starts from here on comes after."""
        _join(self._host, done)

    def _of(self, tensor: Tensor, now: int) -> _Memory:
        return self._memory.setdefault(_address(tensor), _Memory(now))

    def _taken(self, address: int) -> None:
        self._memory[address] = _Memory(torch.cuda.current_stream().cuda_stream)

    def _given_back(self, address: int) -> None:
        memory = self._memory.pop(address, None)
        if memory is None:
            return
        uses = {stream: number for stream, number in memory.uses.items() if stream not in memory.told}
        if not self._over(uses, memory.home):
            end = address + memory.size
            self._freed.append(_Freed(address, end, memory.home, uses, self._where() or "a backward pass"))

    def _taken_again(self, func: Any, address: int, size: int, now: int) -> None:
        """The first use since memory was taken: torch gives it to the stream that it belonged to, at once."""
        self._freed = [freed for freed in self._freed if not self._over(freed.uses, freed.home)]
        for freed in self._freed:
            if freed.begin < address + size and address < freed.end and not self._over(freed.uses, now):
                self._find(
                    f"{func} gets memory that another stream may still use: it was given back without"
                    f" record_stream, at {freed.where}"
                )

    def _over(self, uses: Clock, stream: int) -> bool:
        clock = self._clock(stream)
        return all(number <= max(clock.get(s, 0), self._host.get(s, 0)) for s, number in uses.items())


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: Any, kwargs: Any) -> set[int]:
    values = [args[place] for place, _ in _write_places(func) if place < len(args)]
    values += [kwargs[name] for _, name in _write_places(func) if name in kwargs]
    flat = [one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])]
    return {_address(one) for one in flat if isinstance(one, Tensor)}


@functools.cache
def _write_places(func: Any) -> list[tuple[int, str]]:
    return [
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
