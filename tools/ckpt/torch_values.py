"""Which descriptions in a pickle are tensors, and which are mappings: torch's own rebuild functions, read as words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx.tools.ckpt.dtypes import BITS, STORAGES
from phalanx.tools.ckpt.pickle_values import Call, Global, Pairs, Persistent

MAX_DIMS = 64
MAX_SIDE = 1 << 62

MAPPINGS = {
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.Counter",
    "builtins.dict",
    "__builtin__.dict",
}
#: What describing a file treats as plain; `weights_only` refuses every other name.
_PLAIN = {
    "torch.Size", "torch.Tensor", "torch.device", "torch.Generator", "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer", "torch._tensor._rebuild_from_type_v2", "torch.serialization._get_layout",
    "torch.storage.UntypedStorage", "torch.storage.TypedStorage", "torch.storage._load_from_bytes",
    "builtins.set", "builtins.bytearray", "builtins.complex", "_codecs.encode", "__builtin__.set",
    "collections.OrderedDict", "collections.Counter", "collections.defaultdict", "builtins.dict",
}  # fmt: skip


def is_plain_name(name: str) -> bool:
    """Whether torch's ``weights_only`` would take this name (as far as its default list goes)."""
    module, _, last = name.rpartition(".")
    if module == "torch":
        return name in _PLAIN or last in STORAGES or last in BITS
    return name in _PLAIN or (module == "torch._utils" and last.startswith("_rebuild_"))


@dataclass(frozen=True)
class StorageRef:
    """A storage as the pickle names it: ``key`` finds its bytes."""

    key: str
    dtype: str
    count: int
    start: int = 0  # elements into the bytes that `key` finds: legacy files have views of storages

    @property
    def bytes(self) -> int:
        return self.count * BITS[self.dtype] // 8


@dataclass(frozen=True)
class TensorValue:
    """A tensor as the pickle describes it.

    Attributes:
        storage: Where its values are; None where the file has none for it (meta tensors).
        offset: First element within the storage.
        note: What is special about it, in words; such a tensor is described and not read.
    """

    dtype: str
    shape: tuple[int, ...]
    storage: StorageRef | None = None
    offset: int = 0
    stride: tuple[int, ...] = field(default=())
    note: str = ""


def dtype_of(value: Any) -> str | None:
    """``float32`` for the name ``torch.float32``."""
    if isinstance(value, Global) and value.module == "torch" and value.name in BITS:
        return value.name
    return None


def sizes_of(value: Any) -> tuple[int, ...] | None:
    """A shape or stride: a tuple, list or torch.Size of numbers that could be real."""
    if isinstance(value, Call) and value.name == "torch.Size" and _is_tuple(value.args, 1):
        value = value.args[0]
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMS:
        return None
    if not all(type(side) is int and 0 <= side < MAX_SIDE for side in value):
        return None
    return tuple(value)


def storage_of(value: Any) -> StorageRef | None:
    """The storage that a persistent id names, in torch's form."""
    if not isinstance(value, Persistent) or not isinstance(value.id, tuple) or len(value.id) < 5:
        return None
    kind, storage_type, key, _, count, *view = value.id
    if kind != "storage" or not isinstance(storage_type, Global) or not isinstance(key, str):
        return None
    dtype = STORAGES.get(storage_type.name) if storage_type.module.partition(".")[0] == "torch" else None
    if dtype is None or type(count) is not int or not 0 <= count < MAX_SIDE:
        return None
    if view and isinstance(view[0], tuple) and len(view[0]) == 3:
        _, start, count = view[0]
        if not all(type(number) is int and 0 <= number < MAX_SIDE for number in (start, count)):
            return None
        return StorageRef(key, dtype, count, start)
    return StorageRef(key, dtype, count)


def tensor_of(value: Any, depth: int = 8) -> TensorValue | None:
    """The tensor that a description stands for; None for everything else."""
    if not isinstance(value, Call) or not isinstance(value.args, tuple) or depth == 0:
        return None
    name, args = value.name, value.args
    if name in _REBUILDS:
        try:
            return _REBUILDS[name](args, depth)
        except (IndexError, TypeError, ValueError):
            return None
    return None


def _is_tuple(value: Any, length: int) -> bool:
    return isinstance(value, tuple) and len(value) == length


def _strided(args: tuple[Any, ...], depth: int) -> TensorValue | None:
    storage, shape, stride = storage_of(args[0]), sizes_of(args[2]), sizes_of(args[3])
    offset = args[1]
    if storage is None or shape is None or stride is None or len(shape) != len(stride):
        return None
    if type(offset) is not int or not 0 <= offset < MAX_SIDE:
        return None
    return TensorValue(storage.dtype, shape, storage, offset, stride)


def _with_dtype(args: tuple[Any, ...], depth: int) -> TensorValue | None:
    """``_rebuild_tensor_v3``: the storage counts bytes, and the dtype is named apart."""
    found, dtype = _strided(args, depth), dtype_of(args[6])
    if found is None or found.storage is None or dtype is None:
        return None
    width = BITS[dtype] // 8
    storage = StorageRef(found.storage.key, dtype, found.storage.bytes // width, found.storage.start)
    return TensorValue(dtype, found.shape, storage, found.offset, found.stride)


def _first(args: tuple[Any, ...], depth: int) -> TensorValue | None:
    """Parameters: the first argument is the tensor."""
    return tensor_of(args[0], depth - 1)


def _of_type(args: tuple[Any, ...], depth: int) -> TensorValue | None:
    """``_rebuild_from_type_v2(func, type, args, state)``: a subclass or a tensor with attributes."""
    return tensor_of(Call(args[0], args[2]), depth - 1)


def _meta(args: tuple[Any, ...], depth: int) -> TensorValue | None:
    dtype, shape = dtype_of(args[0]), sizes_of(args[1])
    return (
        None if dtype is None or shape is None else TensorValue(dtype, shape, note="meta tensor, no values")
    )


def _subclass(args: tuple[Any, ...], depth: int) -> TensorValue | None:
    """``_rebuild_wrapper_subclass(cls, dtype, size, ...)``, such as a DTensor."""
    dtype, shape = dtype_of(args[1]), sizes_of(args[2])
    name = args[0].name if isinstance(args[0], Global) else "subclass"
    return None if dtype is None or shape is None else TensorValue(dtype, shape, note=name)


def _quantized(args: tuple[Any, ...], depth: int) -> TensorValue | None:
    found = _strided(args, depth)
    if found is None:
        return None
    return TensorValue(found.dtype, found.shape, found.storage, found.offset, found.stride, note="quantized")


def _sparse(args: tuple[Any, ...], depth: int) -> TensorValue | None:
    """``_rebuild_sparse_tensor(layout, (indices, values, size, ..))``: the size is that of the dense tensor."""
    parts = args[1]
    values = next(
        (tensor_of(part, depth - 1) for part in reversed(parts[:3]) if tensor_of(part, depth - 1)), None
    )
    shape = next((sizes_of(part) for part in reversed(parts) if sizes_of(part) is not None), None)
    if values is None or shape is None:
        return None
    return TensorValue(values.dtype, shape, note="sparse")


_REBUILDS = {
    "torch._utils._rebuild_tensor": _strided,
    "torch._utils._rebuild_tensor_v2": _strided,
    "torch._utils._rebuild_tensor_v3": _with_dtype,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch.nn.parameter.Parameter": _first,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_wrapper_subclass": _subclass,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_sparse_csr_tensor": _sparse,
}


def mapping_of(value: Any) -> list[tuple[Any, Any]] | None:
    """The entries of a dict, of a dict-like of Python's own, or of a pickled module; None for everything else."""
    if isinstance(value, Pairs):
        return value.pairs
    if not isinstance(value, Call):
        return None
    if value.name in MAPPINGS:
        return [*_given(value.args), *value.pairs]
    return module_entries(value)


def _given(args: Any) -> list[tuple[Any, Any]]:
    """Entries passed to the constructor, as old pickles do."""
    if not isinstance(args, tuple) or not args:
        return []
    given = args[-1]
    if isinstance(given, Pairs):
        return given.pairs
    if isinstance(given, list) and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in given):
        return [(pair[0], pair[1]) for pair in given]
    return []


def attributes_of(value: Call) -> list[tuple[Any, Any]]:
    """What would be put into an object's ``__dict__``."""
    found: list[tuple[Any, Any]] = []
    for state in value.states:
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            if isinstance(part, Pairs):
                found += part.pairs
    return found


def module_entries(value: Call) -> list[tuple[Any, Any]] | None:
    """A pickled ``nn.Module``'s parameters, buffers and children; None for everything else."""
    attributes = {name: entry for name, entry in attributes_of(value) if isinstance(name, str)}
    if "_modules" not in attributes or "_parameters" not in attributes:
        return None
    entries: list[tuple[Any, Any]] = []
    for name in ("_parameters", "_buffers", "_modules"):
        inner = attributes.get(name)
        if isinstance(inner, Pairs) or (isinstance(inner, Call) and inner.name in MAPPINGS):
            entries += mapping_of(inner) or []
    return entries
