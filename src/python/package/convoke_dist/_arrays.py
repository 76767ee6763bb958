"""Describes arrays by address, length and element type, without a copy."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

from .errors import InvalidArgument

# The names of numpy and torch, in the order of the numbers of `cvk_type`.
TYPES = (
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "bool",
    "complex64",
    "complex128",
)
_FORMATS = {
    "b": "int8",
    "B": "uint8",
    "c": "uint8",
    "?": "bool",
    "e": "float16",
    "f": "float32",
    "d": "float64",
    "h": "int16",
    "H": "uint16",
    "i": "int32",
    "I": "uint32",
    "q": "int64",
    "Q": "uint64",
    "l": f"int{8 * ctypes.sizeof(ctypes.c_long)}",
    "L": f"uint{8 * ctypes.sizeof(ctypes.c_long)}",
}


class Memory(NamedTuple):
    """Elements of one type. The memory is valid as long as `owner` lives."""

    address: int
    count: int
    type: int
    owner: Any


def type_number(name: str) -> int:
    if name not in TYPES:
        raise InvalidArgument(f"arrays of {name} cannot be sent; these types can: {', '.join(TYPES)}")
    return TYPES.index(name)


def describe(array: Any, writable: bool, what: str = "array") -> Memory:
    """Describes a CPU tensor of torch, an array of numpy, or any object with the buffer protocol."""
    if hasattr(array, "data_ptr") and hasattr(array, "is_contiguous"):
        return _tensor(array, what)
    if hasattr(array, "__array_interface__"):
        return _ndarray(array, writable, what)
    return _buffer(array, writable, what)


def _tensor(tensor: Any, what: str) -> Memory:
    if tensor.device.type != "cpu":
        raise InvalidArgument(f"{what}: the tensor is on {tensor.device}; convoke_dist moves CPU tensors")
    if not tensor.is_contiguous():
        raise InvalidArgument(f"{what}: the tensor is not contiguous: pass tensor.contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument(f"{what}: the tensor is a lazy conjugate or negative: pass tensor.resolve_conj()")
    name = str(tensor.dtype).removeprefix("torch.")
    return Memory(tensor.data_ptr(), tensor.numel(), type_number(name), tensor)


def _ndarray(array: Any, writable: bool, what: str) -> Memory:
    interface = array.__array_interface__
    address, read_only = interface["data"]
    if not getattr(array.flags, "c_contiguous", False):
        raise InvalidArgument(f"{what}: the array is not contiguous: pass numpy.ascontiguousarray(array)")
    if writable and read_only:
        raise InvalidArgument(f"{what}: the array is read-only")
    if not array.dtype.isnative:
        raise InvalidArgument(f"{what}: the array is in the byte order of other machines ({array.dtype})")
    return Memory(address, math.prod(interface["shape"]), type_number(array.dtype.name), array)


def _buffer(array: Any, writable: bool, what: str) -> Memory:
    try:
        view = memoryview(array)
    except TypeError:
        kind = type(array).__name__
        message = f"{what}: pass a numpy array, a CPU tensor of torch, or a buffer such as bytearray, not {kind}"
        raise InvalidArgument(message) from None
    if not view.c_contiguous:
        raise InvalidArgument(f"{what}: the buffer is not contiguous")
    # All machines that convoke runs on are little-endian.
    number = type_number(_FORMATS.get(view.format.lstrip("@=<"), f"format {view.format!r}"))
    count = view.nbytes // view.itemsize
    if view.readonly:
        if writable:
            raise InvalidArgument(f"{what}: the buffer is read-only")
        # ctypes gives no address of read-only memory.
        view = memoryview(bytearray(view))
    if count == 0:
        return Memory(0, 0, number, view)
    owner = (ctypes.c_char * view.nbytes).from_buffer(view)
    return Memory(ctypes.addressof(owner), count, number, owner)
