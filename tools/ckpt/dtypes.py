"""Names and sizes of element types, in torch's, safetensors' and numpy's words."""

from __future__ import annotations

from phalanx.dist.checkpoint_files import DTYPES

#: Bits per element, by torch's name without ``torch.``.
BITS = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16,
    "int64": 64, "int32": 32, "int16": 16, "int8": 8, "uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64,
    "bool": 8, "complex32": 32, "complex64": 64, "complex128": 128,
    "float8_e4m3fn": 8, "float8_e5m2": 8, "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "float4_e2m1fn_x2": 8, "quint8": 8, "qint8": 8, "qint32": 32, "quint4x2": 8, "quint2x4": 8,
    "bits1x8": 8, "bits2x4": 8, "bits4x2": 8, "bits8": 8, "bits16": 16,
    **{f"{sign}int{bits}": 8 for sign in ("", "u") for bits in range(1, 8)},
}  # fmt: skip

#: The storage classes that torch's pickles name.
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16",
    "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "QUInt8Storage": "quint8", "QInt8Storage": "qint8",
    "QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}  # fmt: skip
STORAGE_OF = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}

_SAFETENSORS_ONLY = {
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C128": "complex128",
}  # fmt: skip
#: safetensors' name to ours.
FROM_SAFETENSORS = {short: name for name, short in DTYPES.items()} | _SAFETENSORS_ONLY
#: Widths that safetensors knows and torch has no type for; shown under safetensors' own name.
SUB_BYTE = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
#: Ours to safetensors'.
TO_SAFETENSORS = {name: short for short, name in FROM_SAFETENSORS.items()}

#: Types that numpy reads as they are.
NUMPY = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4", "int16": "<i2",
    "int8": "<i1", "uint8": "<u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8", "bool": "?",
    "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip


def item_bytes(dtype: str) -> int:
    """Bytes per element of one of torch's types."""
    return BITS[dtype] // 8


def size_bytes(dtype: str, count: int) -> int:
    """Bytes of `count` elements; types narrower than a byte are packed."""
    return (count * (SUB_BYTE.get(dtype) or BITS[dtype]) + 7) // 8
