"""A pickle read without running it: every call becomes a description of that call.

Python's own unpickler imports and calls what the file names. This one knows the opcodes and nothing else. Its
work is linear in the bytes it reads, and what it may keep in memory is bounded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from phalanx.tools.ckpt.pickle_values import Call, Global, Members, Pairs, Persistent

MAX_VALUES = 6_000_000  # what a pickle may describe; a tensor takes about 15
MAX_DIGITS = 4000  # of a number in decimal: turning digits into a number takes quadratic time
_LINE_LIMIT = 65536
_BIG = 3  # an object with lists of its own counts for this many values


class PickleProblem(ValueError):
    """Not a whole pickle, or one made to exhaust memory."""


class _Mark:
    __slots__ = ()


_MARK = _Mark()


class PickleMachine:
    """Reads one pickle out of `data`, from `position` on.

    Args:
        data: The bytes; what follows the pickle's end is not looked at.
        position: Where it begins.

    Raises:
        PickleProblem: From `run`.
    """

    def __init__(self, data: bytes, position: int = 0) -> None:
        self.data, self.position = data, position
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[str, None] = {}
        self.count = 0

    def run(self) -> Any:
        """The value described; afterwards `position` is just behind the pickle."""
        data, handlers, end = self.data, _HANDLERS, len(self.data)
        try:
            while self.position < end:
                code = data[self.position]
                self.position += 1
                if code == 0x2E:  # STOP
                    return self.stack.pop()
                handlers[code](self)
                if self.count > MAX_VALUES:
                    raise PickleProblem(f"describes more than {MAX_VALUES:,} values")
        except KeyError as error:
            if isinstance(error, _NoMemo):
                raise PickleProblem(f"refers to value {error.args[0]}, which was never stored") from None
            raise PickleProblem(
                f"byte {self.position - 1} ({data[self.position - 1]:#04x}) is no instruction of a pickle"
            ) from None
        except (IndexError, TypeError, AttributeError):
            raise PickleProblem(f"its instructions make no sense at byte {self.position - 1}") from None
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            if isinstance(error, PickleProblem):
                raise
            raise PickleProblem(
                f"what stands at byte {self.position - 1} cannot be read as what it should be"
            ) from None
        raise Cut("ends before it is complete")

    # What the opcodes are made of.

    def take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if count < 0 or self.position > len(self.data):
            raise Cut("ends before it is complete")
        return self.data[start : self.position]

    def number(self, form: struct.Struct) -> int:
        value: int = form.unpack(self.take(form.size))[0]
        return value

    def line(self) -> bytes:
        start = self.position
        end = self.data.find(b"\n", start, start + _LINE_LIMIT)
        if end < 0 and start + _LINE_LIMIT < len(self.data):
            raise PickleProblem("holds an endless line")
        if end < 0:
            raise Cut("ends before it is complete")
        self.position = end + 1
        return self.data[start:end]

    def push(self, value: Any, cost: int = 1) -> None:
        self.count += cost
        self.stack.append(value)

    def pop(self) -> Any:
        if self.marks and self.marks[-1] >= len(self.stack):
            raise IndexError
        return self.stack.pop()

    def top(self) -> Any:
        if self.marks and self.marks[-1] >= len(self.stack):
            raise IndexError
        return self.stack[-1]

    def to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def name_global(self, module: Any, name: Any) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError
        found = Global(module, name)
        self.globals[found.full_name[:300]] = None
        return found


class Cut(PickleProblem):
    """The data ends within the pickle."""


class _NoMemo(KeyError):
    pass


_U1, _U2, _I4, _U4, _U8, _F8 = (struct.Struct(form) for form in ("<B", "<H", "<i", "<I", "<Q", ">d"))
_Handler = Callable[[PickleMachine], None]
_HANDLERS: dict[int, _Handler] = {}


def _on(*codes: bytes) -> Callable[[_Handler], _Handler]:
    def register(handler: _Handler) -> _Handler:
        _HANDLERS.update({code[0]: handler for code in codes})
        return handler

    return register


def _constant(code: bytes, make: Callable[[], Any], cost: int = 1) -> None:
    _HANDLERS[code[0]] = lambda machine: machine.push(make(), cost)


def _counted(code: bytes, form: struct.Struct, convert: Callable[[Any], Any]) -> None:
    """A length, then so many bytes."""

    def handler(machine: PickleMachine) -> None:
        machine.push(convert(machine.take(machine.number(form))))

    _HANDLERS[code[0]] = handler


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _latin(data: bytes) -> str:
    return str(data, "latin-1")


def _whole(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_constant(b"N", lambda: None)
_constant(b"\x88", lambda: True)
_constant(b"\x89", lambda: False)
_constant(b")", lambda: ())
_constant(b"]", list)
_constant(b"}", Pairs, _BIG)
_constant(b"\x8f", lambda: Members([], False), _BIG)
for _code, _form in ((b"J", _I4), (b"K", _U1), (b"M", _U2)):
    _HANDLERS[_code[0]] = lambda machine, form=_form: machine.push(machine.number(form))  # type: ignore[misc]
_counted(b"X", _U4, _text)
_counted(b"\x8c", _U1, _text)
_counted(b"\x8d", _U8, _text)
_counted(b"T", _I4, _latin)
_counted(b"U", _U1, _latin)
_counted(b"B", _U4, bytes)
_counted(b"C", _U1, bytes)
_counted(b"\x8e", _U8, bytes)
_counted(b"\x96", _U8, bytearray)
_counted(b"\x8a", _U1, _whole)
_counted(b"\x8b", _I4, _whole)


@_on(b"\x80")
def _proto(machine: PickleMachine) -> None:
    version = machine.number(_U1)
    if version > 5:
        raise PickleProblem(f"is of pickle protocol {version}, and there are only 0 to 5")


@_on(b"\x95")
def _frame(machine: PickleMachine) -> None:
    machine.number(_U8)


@_on(b"(")
def _mark(machine: PickleMachine) -> None:
    machine.count += 1
    machine.marks.append(len(machine.stack))


@_on(b"0")
def _pop(machine: PickleMachine) -> None:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


@_on(b"1")
def _pop_mark(machine: PickleMachine) -> None:
    machine.to_mark()


@_on(b"2")
def _dup(machine: PickleMachine) -> None:
    machine.push(machine.top())


@_on(b"G")
def _binfloat(machine: PickleMachine) -> None:
    machine.push(_F8.unpack(machine.take(8))[0])


@_on(b"F")
def _float(machine: PickleMachine) -> None:
    machine.push(float(machine.line()))


@_on(b"I")
def _int(machine: PickleMachine) -> None:
    line = machine.line()
    machine.push({b"00": False, b"01": True}[line] if line in (b"00", b"01") else _decimal(line))


@_on(b"L")
def _long(machine: PickleMachine) -> None:
    machine.push(_decimal(machine.line().rstrip(b"L")))


def _decimal(digits: bytes) -> int:
    if len(digits) > MAX_DIGITS:
        raise PickleProblem(f"holds a number of {len(digits)} digits")
    return int(digits)


@_on(b"S")
def _string(machine: PickleMachine) -> None:
    line = machine.line().strip()
    if len(line) < 2 or line[0] != line[-1] or line[:1] not in (b"'", b'"'):
        raise TypeError
    machine.push(line[1:-1].decode("latin-1"))


@_on(b"V")
def _unicode(machine: PickleMachine) -> None:
    machine.push(machine.line().decode("raw-unicode-escape"))


@_on(b"P")
def _persid(machine: PickleMachine) -> None:
    machine.push(Persistent(machine.line().decode("ascii")))


@_on(b"Q")
def _binpersid(machine: PickleMachine) -> None:
    machine.push(Persistent(machine.pop()))


@_on(b"c")
def _global(machine: PickleMachine) -> None:
    module, name = (machine.line().decode("utf-8") for _ in range(2))
    machine.push(machine.name_global(module, name))


@_on(b"\x93")
def _stack_global(machine: PickleMachine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.push(machine.name_global(module, name))


@_on(b"\x82", b"\x83", b"\x84")
def _extension(machine: PickleMachine) -> None:
    size = {0x82: 1, 0x83: 2, 0x84: 4}[machine.data[machine.position - 1]]
    code = int.from_bytes(machine.take(size), "little")
    machine.push(machine.name_global("copyreg", f"extension_{code}"))


@_on(b"R")
def _reduce(machine: PickleMachine) -> None:
    args, func = machine.pop(), machine.pop()
    machine.push(Call(func, args), _BIG)


@_on(b"\x81")
def _newobj(machine: PickleMachine) -> None:
    args, func = machine.pop(), machine.pop()
    machine.push(Call(func, args, "NEWOBJ"), _BIG)


@_on(b"\x92")
def _newobj_ex(machine: PickleMachine) -> None:
    kwargs, args, func = machine.pop(), machine.pop(), machine.pop()
    machine.push(Call(func, args, "NEWOBJ_EX", kwargs), _BIG)


@_on(b"o")
def _obj(machine: PickleMachine) -> None:
    func, *args = machine.to_mark()
    machine.push(Call(func, tuple(args), "OBJ"), _BIG)


@_on(b"i")
def _inst(machine: PickleMachine) -> None:
    module, name = (machine.line().decode("utf-8") for _ in range(2))
    args = tuple(machine.to_mark())
    machine.push(Call(machine.name_global(module, name), args, "OBJ"), _BIG)


@_on(b"b")
def _build(machine: PickleMachine) -> None:
    state, target = machine.pop(), machine.top()
    if isinstance(target, Call):
        target.states.append(state)
    elif not isinstance(target, Global | Persistent):
        raise TypeError


@_on(b"a")
def _append(machine: PickleMachine) -> None:
    item = machine.pop()
    _extend(machine.top(), [item])


@_on(b"e")
def _appends(machine: PickleMachine) -> None:
    items = machine.to_mark()
    _extend(machine.top(), items)


@_on(b"\x90")
def _additems(machine: PickleMachine) -> None:
    items = machine.to_mark()
    target = machine.top()
    if not isinstance(target, Members | Call):
        raise TypeError
    target.items.extend(items)


def _extend(target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, Call):
        target.items.extend(items)
    else:
        raise TypeError


@_on(b"s")
def _setitem(machine: PickleMachine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.count += 1
    machine.top().pairs.append((key, value))


@_on(b"u")
def _setitems(machine: PickleMachine) -> None:
    items = machine.to_mark()
    machine.count += len(items)
    machine.top().pairs.extend(_paired(items))


@_on(b"d")
def _dict(machine: PickleMachine) -> None:
    items = machine.to_mark()
    machine.push(Pairs(_paired(items)), _BIG + len(items))


def _paired(items: list[Any]) -> list[tuple[Any, Any]]:
    if len(items) % 2:
        raise TypeError
    return list(zip(items[::2], items[1::2], strict=True))


@_on(b"l")
def _list(machine: PickleMachine) -> None:
    machine.push(machine.to_mark())


@_on(b"t")
def _tuple(machine: PickleMachine) -> None:
    machine.push(tuple(machine.to_mark()))


@_on(b"\x91")
def _frozenset(machine: PickleMachine) -> None:
    machine.push(Members(machine.to_mark(), True), _BIG)


@_on(b"\x85", b"\x86", b"\x87")
def _short_tuple(machine: PickleMachine) -> None:
    count = machine.data[machine.position - 1] - 0x84
    machine.push(tuple(reversed([machine.pop() for _ in range(count)])))


def _put(machine: PickleMachine, number: int) -> None:
    if number < 0:
        raise TypeError
    machine.count += 1
    machine.memo[number] = machine.top()


def _get(machine: PickleMachine, number: int) -> None:
    if number not in machine.memo:
        raise _NoMemo(number)
    machine.push(machine.memo[number])


_on(b"p")(lambda machine: _put(machine, _decimal(machine.line())))
_on(b"q")(lambda machine: _put(machine, machine.number(_U1)))
_on(b"r")(lambda machine: _put(machine, machine.number(_U4)))
_on(b"\x94")(lambda machine: _put(machine, len(machine.memo)))
_on(b"g")(lambda machine: _get(machine, _decimal(machine.line())))
_on(b"h")(lambda machine: _get(machine, machine.number(_U1)))
_on(b"j")(lambda machine: _get(machine, machine.number(_U4)))
