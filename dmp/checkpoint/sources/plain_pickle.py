"""A pickle as plain data: nothing that it names is looked up, called or changed.

[Note: records]
A pickle is a program: it names functions and has them called. Here a name is only a name. What would be a call, or an
object with its state, becomes a `Record` that says so, and names that are not expected are an error. So no pickle can
do more than fill memory, and that by no more than its own length allows.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections.abc import Callable, Collection
from typing import Any, NamedTuple


class Global(NamedTuple):
    """A class or a function by its name; it was not looked up."""

    module: str
    name: str


class Record:
    """What would be an object; see [Note: records].

    Args:
        of: what would be called.
        args: with which arguments.
    """

    __slots__ = ("args", "of", "state")

    def __init__(self, of: Global, args: tuple[Any, ...]) -> None:
        self.of = of
        self.args = args
        self.state: Any = None


def read_pickle(data: bytes, allowed: Collection[tuple[str, str]]) -> Any:
    """What a pickle holds, as numbers, strings, tuples, lists, dicts, `Global` and `Record`.

    An `OrderedDict` is a dict, a `torch.Size` a tuple, a persistent id a `Record` of `Global("", "persistent")`.

    Args:
        data: the pickle, of protocol 2 or later.
        allowed: (module, name) of all that may be named.

    Raises:
        pickle.UnpicklingError: a name that is not expected, an operation that plain data do not need, or no pickle.
    """
    return _Reader(data, allowed).read_whole()


def check_nesting(data: bytes) -> None:
    """Of a pickle that `torch.load(weights_only=True)` will read: tuples in tuples without end would end the process.

    Raises:
        pickle.UnpicklingError: nested too deeply, or nothing that torch can read so.
    """
    _Scanner(data, ()).read_whole()


_MOST_DEPTH = 1000  # what Python itself can write
_MARK: Any = object()
_PERSISTENT = Global("", "persistent")
_ORDERED, _SIZE = ("collections", "OrderedDict"), ("torch", "Size")


class _Reader:
    """A pickle's stack machine, with a method for each kind of operation; what is not in `_OPERATIONS` is refused."""

    def __init__(self, data: bytes, allowed: Collection[tuple[str, str]]) -> None:
        self._data = data
        self._allowed = {*allowed, _ORDERED, _SIZE}
        self._at = 0
        self._stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._depths: dict[int, int] = {}  # of live tuples by id; what another object left there is too large at most

    def read_whole(self) -> Any:
        """What it holds; any fault is an `UnpicklingError`."""
        data, operations = self._data, _OPERATIONS
        try:
            while (code := data[self._at]) != _STOP:
                self._at += 1
                operation = operations.get(code)
                if operation is None:
                    name = next((op.name for op in pickletools.opcodes if ord(op.code) == code), f"byte {code}")
                    raise pickle.UnpicklingError(f"the operation {name} has no place in plain data")
                operation(self)
            return self._stack.pop()
        except (IndexError, KeyError, struct.error, UnicodeDecodeError, TypeError, ValueError) as error:
            raise pickle.UnpicklingError(f"it is not a whole pickle ({type(error).__name__})") from error

    def take(self, count: int) -> bytes:
        start = self._at
        self._at += count
        if count < 0 or self._at > len(self._data):
            raise IndexError
        return self._data[start : self._at]

    def number(self, form: str, count: int) -> Any:
        return struct.unpack(form, self.take(count))[0]

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        return self._stack.pop()

    def text(self, count: int) -> None:
        self.push(self.take(count).decode("utf-8", "surrogatepass"))

    def line(self) -> str:
        end = self._data.index(b"\n", self._at)
        text = self._data[self._at : end].decode()
        self._at = end + 1
        return text

    def marked(self) -> list[Any]:
        """What lies above the last mark, which is taken away."""
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def tuple_of(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError
        items = self._stack[-count:]
        del self._stack[-count:]
        self.as_tuple(items)

    def as_tuple(self, items: list[Any]) -> None:
        """A tuple of tuples of tuples would end the process where Python prints, compares or frees it."""
        made = tuple(items)
        depth = 1 + max((self._depths.get(id(item), 0) for item in items if type(item) is tuple), default=0)
        if depth > _MOST_DEPTH:
            raise pickle.UnpicklingError("it is nested too deeply")
        self._depths[id(made)] = depth
        self.push(made)

    def extend(self, items: list[Any]) -> None:
        top = self._stack[-1]
        if type(top) is not list:
            raise pickle.UnpicklingError("it appends to what is no list")
        top.extend(items)

    def update(self, items: list[Any]) -> None:
        top = self._stack[-1]
        if type(top) is not dict or len(items) % 2:
            raise pickle.UnpicklingError("it sets items of what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int, Record):
                raise pickle.UnpicklingError(f"a key is a {type(key).__name__}; expected a name")
            top[key] = value

    def name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)) or (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"{module!s:.80}.{name!s:.80} has no place in a checkpoint's metadata")
        self.push(Global(module, name))

    def call(self) -> None:
        """Note what would be called; only dicts and sizes are made."""
        args, of = self._stack.pop(), self._stack.pop()
        if type(of) is not Global or type(args) is not tuple:
            raise pickle.UnpicklingError("it calls what is no name")
        if of == _ORDERED and not args:
            self.push({})
        elif of == _SIZE and len(args) == 1 and type(args[0]) in (tuple, list):
            self.as_tuple(list(args[0]))
        else:
            self.push(Record(of, args))

    def build(self) -> None:
        """Note an object's state, once."""
        state, top = self._stack.pop(), self._stack[-1]
        if type(top) is dict and type(state) is dict:
            return  # attributes of an OrderedDict, as torch gives a module's state; they say nothing here
        if type(top) is not Record or top.state is not None:
            raise pickle.UnpicklingError("it sets the state of what is no new object")
        top.state = state

    def memoize(self, index: int) -> None:
        if self._stack[-1] is _MARK:
            raise IndexError
        self.memo[index] = self._stack[-1]


class _Scanner(_Reader):
    """Looks at how deep it is nested, and keeps no more than it needs for that."""

    def extend(self, items: list[Any]) -> None:
        pass

    def update(self, items: list[Any]) -> None:
        pass

    def name(self, module: Any, name: Any) -> None:
        self.push(None)

    def call(self) -> None:
        args = self.pop()
        self._stack[-1] = args if type(args) is tuple else None  # a class of tuples could be as deep as they are

    def build(self) -> None:
        self.pop()


_STOP = pickle.STOP[0]
_TABLE: dict[bytes, Callable[[_Reader], Any]] = {
    pickle.PROTO: lambda r: r.take(1),
    pickle.FRAME: lambda r: r.take(8),
    pickle.MARK: lambda r: r.push(_MARK),
    pickle.NONE: lambda r: r.push(None),
    pickle.NEWTRUE: lambda r: r.push(True),
    pickle.NEWFALSE: lambda r: r.push(False),
    pickle.BININT: lambda r: r.push(r.number("<i", 4)),
    pickle.BININT1: lambda r: r.push(r.take(1)[0]),
    pickle.BININT2: lambda r: r.push(r.number("<H", 2)),
    pickle.LONG1: lambda r: r.push(int.from_bytes(r.take(r.take(1)[0]), "little", signed=True)),
    pickle.BINFLOAT: lambda r: r.push(r.number(">d", 8)),
    pickle.SHORT_BINUNICODE: lambda r: r.text(r.take(1)[0]),
    pickle.SHORT_BINSTRING: lambda r: r.push(r.take(r.take(1)[0])),
    pickle.BINUNICODE: lambda r: r.text(r.number("<I", 4)),
    pickle.EMPTY_TUPLE: lambda r: r.push(()),
    pickle.TUPLE1: lambda r: r.tuple_of(1),
    pickle.TUPLE2: lambda r: r.tuple_of(2),
    pickle.TUPLE3: lambda r: r.tuple_of(3),
    pickle.TUPLE: lambda r: r.as_tuple(r.marked()),
    pickle.EMPTY_LIST: lambda r: r.push([]),
    pickle.EMPTY_SET: lambda r: r.push(None),
    pickle.APPEND: lambda r: r.extend([r.pop()]),
    pickle.APPENDS: lambda r: r.extend(r.marked()),
    pickle.EMPTY_DICT: lambda r: r.push({}),
    pickle.SETITEM: lambda r: r.update([r.pop(), r.pop()][::-1]),
    pickle.SETITEMS: lambda r: r.update(r.marked()),
    pickle.MEMOIZE: lambda r: r.memoize(len(r.memo)),
    pickle.BINPUT: lambda r: r.memoize(r.take(1)[0]),
    pickle.LONG_BINPUT: lambda r: r.memoize(r.number("<I", 4)),
    pickle.BINGET: lambda r: r.push(r.memo[r.take(1)[0]]),
    pickle.LONG_BINGET: lambda r: r.push(r.memo[r.number("<I", 4)]),
    pickle.GLOBAL: lambda r: r.name(r.line(), r.line()),
    pickle.STACK_GLOBAL: lambda r: r.name(*[r.pop(), r.pop()][::-1]),
    pickle.BINPERSID: lambda r: r.push(Record(_PERSISTENT, (r.pop(),))),
    pickle.REDUCE: lambda r: r.call(),
    pickle.NEWOBJ: lambda r: r.call(),
    pickle.BUILD: lambda r: r.build(),
}
_OPERATIONS = {code[0]: operation for code, operation in _TABLE.items()}
