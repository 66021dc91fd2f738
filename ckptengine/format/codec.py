"""Tagged JSON: Python values that keep their type, read back without running any code.

Plain JSON stands for itself (None, bool, int, finite float, str, list, dict with plain string keys).
Everything else is an object with one key that starts with ``$``:

    {"$tuple": [..]}  {"$set": [..]}  {"$frozenset": [..]}  {"$dict": [[key, value], ..]}
    {"$odict": [[k, v], ..]}  {"$defaultdict": [[k, v], ..]}  {"$counter": [[k, v], ..]}
    {"$deque": [maxlen, [..]]}  {"$int": "-0x.."} (beyond 64 bits)  {"$float": "7ff8.."} (not finite)
    {"$str": base64} (text that holds surrogates, as UTF-8 with surrogatepass)
    {"$complex": [re, im]}  {"$bytes": base64}  {"$bytearray": base64}
    {"$path": text}  {"$purepath": ["posix" or "windows", text]}
    {"$numpy": [dtype, base64]} (a scalar)  {"$ndarray": [dtype, shape, base64]} (not a tensor's dtype)
    {"$dtype": name}  {"$device": text}  {"$size": [..]}  {"$slice": [start, stop, step]}
    {"$enum": [class, member, value]}  {"$namedtuple": [class, {field: value}]}
    {"$dataclass": [class, {field: value}]}  {"$namespace": {name: value}}
    {"$simplenamespace": {name: value}}

Classes are named ``module:qualname`` and looked up among what is already imported; nothing is
imported and no constructor runs (but that of a flag, for a combination that has no name). Where the
class is not there, a plain stand-in comes back.
"""

from __future__ import annotations

import argparse
import base64
import codecs
import collections
import dataclasses
import enum
import math
import pathlib
import re
import struct
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import CorruptError, StateError

Json = Any
Path = tuple[Any, ...]
Resolve = Callable[[str, Any], Any]

MAX_DEPTH = 100
"""Containers within containers. Rebuilding takes more of Python's stack than taking apart does, so
without a limit a state could be saved and not restored."""

_PLAIN: tuple[type[Any], ...] = (
    int, float, str, bytes, list, tuple, dict, set, frozenset
)  # fmt: skip
_MAPPINGS: dict[type, str] = {
    dict: "$dict",
    collections.OrderedDict: "$odict",
    collections.defaultdict: "$defaultdict",
    collections.Counter: "$counter",
}
_NAMESPACES: dict[type, str] = {
    argparse.Namespace: "$namespace",
    types.SimpleNamespace: "$simplenamespace",
}
_PURE_PATHS: dict[str, type[pathlib.PurePath]] = {
    "posix": pathlib.PurePosixPath,
    "windows": pathlib.PureWindowsPath,
}


def encode(value: Any, path: Path = ()) -> Json:
    """`value` as tagged JSON. Raises StateError, naming `path`, for what has no stored form."""
    try:
        return _encode(value, path)
    except RecursionError:
        raise StateError(
            f"{key_text(path)}: nested too deeply, or contains itself", [key_text(path)]
        ) from None


def too_deep(path: Path) -> StateError:
    """The refusal of what contains itself, or might as well."""
    key = key_text(path[:1])
    return StateError(
        f"{key}: nested more than {MAX_DEPTH} levels deep, or contains itself: "
        f"{key_text(path[:5])}/..",
        [key],
    )


def _encode(value: Any, path: Path) -> Json:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value if value.isascii() else _encode_text(value)
    if len(path) > MAX_DEPTH:
        raise too_deep(path)
    if kind is int:
        return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
    if kind is float:
        if math.isfinite(value):
            return value
        return {"$float": struct.pack(">d", value).hex()}
    if kind is list:
        return [_encode(item, (*path, index)) for index, item in enumerate(value)]
    if kind in _MAPPINGS:
        return pack_mapping(
            value, [(_encode(k, path), _encode(v, (*path, k))) for k, v in value.items()]
        )
    if kind is tuple:
        return {"$tuple": [_encode(item, (*path, index)) for index, item in enumerate(value)]}
    if kind in (set, frozenset):
        return {f"${kind.__name__}": [_encode(item, (*path, i)) for i, item in enumerate(value)]}
    if kind is complex:
        return {"$complex": [_encode(value.real, path), _encode(value.imag, path)]}
    if kind in (bytes, bytearray):
        return {f"${kind.__name__}": base64.b64encode(value).decode()}
    return _encode_object(value, path)


def _encode_text(text: str) -> Json:
    try:
        text.encode()
    except UnicodeEncodeError:
        # JSON would read two surrogates that stand side by side as one character.
        return {"$str": base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()}
    return text


def _encode_object(value: Any, path: Path) -> Json:
    if isinstance(value, enum.Enum):
        return {"$enum": [class_name(type(value)), value.name, _encode(value.value, path)]}
    if isinstance(value, pathlib.Path):
        return {"$path": _encode(str(value), path)}
    if isinstance(value, pathlib.PurePath):
        family = "windows" if isinstance(value, pathlib.PureWindowsPath) else "posix"
        return {"$purepath": [family, _encode(str(value), path)]}
    if isinstance(value, slice):
        return {"$slice": [_encode(v, path) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, collections.deque):
        items = [_encode(item, (*path, index)) for index, item in enumerate(value)]
        return {"$deque": [value.maxlen, items]}
    for cls, tag in _NAMESPACES.items():
        if isinstance(value, cls):
            return {tag: {k: _encode(v, (*path, k)) for k, v in vars(value).items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: _encode(getattr(value, f.name), (*path, f.name))
            for f in dataclasses.fields(value)
            if hasattr(value, f.name)
        }
        return {"$dataclass": [class_name(type(value)), fields]}
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, (numpy.generic, numpy.ndarray)):
        return _encode_numpy(value, path)
    torch = sys.modules.get("torch")
    if torch and isinstance(value, torch.Tensor):
        raise _refuse(value, path, "tensors are stored in dictionaries, lists and tuples only")
    if torch and isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if torch and isinstance(value, torch.device):
        return {"$device": str(value)}
    if torch and isinstance(value, torch.Size):
        return {"$size": list(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = {f: _encode(v, (*path, f)) for f, v in zip(value._fields, value, strict=True)}
        return {"$namedtuple": [class_name(type(value)), fields]}
    # Subclasses of plain types (a version string, say) are stored as the plain data they hold.
    for base in _PLAIN:
        if isinstance(value, base):
            return _encode(base(value), path)
    raise _refuse(value, path, "give its class state_dict and load_state_dict, or store plain data")


def _encode_numpy(value: Any, path: Path) -> Json:
    import numpy

    dtype = value.dtype
    if dtype.hasobject or dtype != numpy.dtype(dtype.str):
        raise _refuse(
            value,
            path,
            f"its dtype {dtype} has no plain form; store it as arrays of numbers or text",
        )
    if isinstance(value, numpy.ma.MaskedArray):
        raise _refuse(value, path, "store its `data` and `mask`")
    # An empty text scalar has no bytes, and NumPy gives one character's.
    raw = base64.b64encode(value.tobytes()[: value.nbytes]).decode()
    if isinstance(value, numpy.generic):
        return {"$numpy": [dtype.str, raw]}
    return {"$ndarray": [dtype.str, list(value.shape), raw]}


def pack_mapping(value: Mapping[Any, Any], pairs: list[tuple[Json, Json]]) -> Json:
    """The node of a mapping of `value`'s type with these encoded pairs, in order."""
    tag = _MAPPINGS.get(type(value), "$dict")
    if tag == "$dict" and all(type(k) is str and not k.startswith("$") for k, _ in pairs):
        return dict(pairs)
    return {tag: [list(pair) for pair in pairs]}


def decode(node: Json, resolve: Resolve | None = None) -> Any:
    """The value of `node`. Tags not in this module are given to `resolve(tag, body)`.

    Raises CorruptError where the form is not one that `encode` makes.
    """
    try:
        return _decode(node, resolve)
    except CorruptError:
        raise
    except (TypeError, ValueError, LookupError, RuntimeError, struct.error) as error:
        raise CorruptError(f"a stored value has a form that no writer makes: {error}") from error


def _decode(node: Json, resolve: Resolve | None) -> Any:
    if isinstance(node, list):
        return [_decode(item, resolve) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next(iter(node), "")
    if not tag.startswith("$"):
        return {k: _decode(v, resolve) for k, v in node.items()}
    if len(node) != 1:
        raise CorruptError(f"a stored value has more than the tag {tag}")
    body = node[tag]
    if tag in _DECODERS:
        return _DECODERS[tag](body, resolve)
    if resolve is None:
        raise CorruptError(f"a stored value has the unknown tag {tag}")
    return resolve(tag, body)


def _pairs(body: Json, resolve: Resolve | None) -> list[tuple[Any, Any]]:
    return [(_decode(k, resolve), _decode(v, resolve)) for k, v in body]


def _decode_enum(body: Json, resolve: Resolve | None) -> Any:
    name, member, value = body
    cls = _find_class(name)
    if isinstance(cls, enum.EnumMeta) and member in cls.__members__:
        return cls.__members__[member]
    if isinstance(cls, enum.EnumMeta) and issubclass(cls, enum.Flag):
        return cls(_decode(value, resolve))
    return _decode(value, resolve)


def _decode_namedtuple(body: Json, resolve: Resolve | None) -> Any:
    name, encoded = body
    fields = {k: _decode(v, resolve) for k, v in encoded.items()}
    cls: Any = _find_class(name)
    if not (isinstance(cls, type) and issubclass(cls, tuple)) or getattr(
        cls, "_fields", None
    ) != tuple(fields):
        make: Any = collections.namedtuple  # a type checker wants to see a literal name
        cls = make(re.split("[.:]", name)[-1], fields)
    return tuple.__new__(cls, fields.values())


def _decode_dataclass(body: Json, resolve: Resolve | None) -> Any:
    name, encoded = body
    fields = {k: _decode(v, resolve) for k, v in encoded.items()}
    cls = _find_class(name)
    if not (
        isinstance(cls, type)
        and dataclasses.is_dataclass(cls)
        and cls.__new__ is object.__new__  # not one that is a dictionary as well, say
    ):
        return types.SimpleNamespace(**fields)
    made = object.__new__(cls)
    for key, value in fields.items():
        object.__setattr__(made, key, value)
    return made


def _decode_numpy(body: Json, resolve: Resolve | None) -> Any:
    dtype, raw = body
    return _numpy_array(dtype, (), raw)[()]


def _decode_ndarray(body: Json, resolve: Resolve | None) -> Any:
    return _numpy_array(*body)


def _numpy_array(name: str, shape: Any, raw: str) -> Any:
    import numpy

    dtype = numpy.dtype(name)
    if not raw and 0 in (dtype.itemsize, *shape):  # `frombuffer` takes no elements of no bytes
        return numpy.zeros(shape, dtype)
    return numpy.frombuffer(base64.b64decode(raw), dtype=dtype).reshape(shape).copy()


def _decode_namespace(cls: type[Any]) -> Callable[[Json, Resolve | None], Any]:
    def decode_into(body: Json, resolve: Resolve | None) -> Any:
        made = cls()
        vars(made).update({k: _decode(v, resolve) for k, v in body.items()})
        return made

    return decode_into


def _torch(name: str) -> Any:
    import torch

    return vars(torch)[name]  # not getattr: torch imports some of its parts on demand


def _decode_dtype(body: Json, resolve: Resolve | None) -> Any:
    found = _torch(body)
    if not isinstance(found, _torch("dtype")):
        raise CorruptError(f"a stored value names {body!r} as a dtype")
    return found


_DECODERS: dict[str, Callable[[Json, Resolve | None], Any]] = {
    "$tuple": lambda b, r: tuple(_decode(i, r) for i in b),
    "$set": lambda b, r: {_decode(i, r) for i in b},
    "$frozenset": lambda b, r: frozenset(_decode(i, r) for i in b),
    "$dict": lambda b, r: dict(_pairs(b, r)),
    "$odict": lambda b, r: collections.OrderedDict(_pairs(b, r)),
    # The factory is code and is not stored; a restore into a defaultdict keeps that one's factory.
    "$defaultdict": lambda b, r: collections.defaultdict(None, _pairs(b, r)),
    "$counter": lambda b, r: collections.Counter(dict(_pairs(b, r))),
    "$deque": lambda b, r: collections.deque((_decode(i, r) for i in b[1]), b[0]),
    "$int": lambda b, r: int(b, 16),
    "$float": lambda b, r: struct.unpack(">d", bytes.fromhex(b))[0],
    "$complex": lambda b, r: complex(_decode(b[0], r), _decode(b[1], r)),
    "$bytes": lambda b, r: base64.b64decode(b),
    "$bytearray": lambda b, r: bytearray(base64.b64decode(b)),
    "$str": lambda b, r: base64.b64decode(b).decode("utf-8", "surrogatepass"),
    "$path": lambda b, r: pathlib.Path(_decode(b, r)),
    "$purepath": lambda b, r: _PURE_PATHS[b[0]](_decode(b[1], r)),
    "$slice": lambda b, r: slice(*(_decode(i, r) for i in b)),
    **{tag: _decode_namespace(cls) for cls, tag in _NAMESPACES.items()},
    "$numpy": _decode_numpy,
    "$ndarray": _decode_ndarray,
    "$dtype": _decode_dtype,
    "$device": lambda b, r: _torch("device")(b),
    "$size": lambda b, r: _torch("Size")(b),
    "$enum": _decode_enum,
    "$namedtuple": _decode_namedtuple,
    "$dataclass": _decode_dataclass,
}


def plain(value: Any) -> Any:
    """`value` in types that `torch.load(weights_only=True)` takes: what stock readers see."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, (numpy.generic, numpy.ndarray)):
        if value.dtype.char in "gG":  # longer than any number of Python
            with numpy.errstate(over="ignore"):
                value = value.astype("f8" if value.dtype.char == "g" else "c16")
        return plain(value.tolist())
    if value is None or type(value) in (bool, float, str):
        return value
    if type(value) is bytes:
        return value or _NoBytes()
    if type(value) is int:
        # The opcode of a longer integer is not on torch's list.
        return value if value.bit_length() < 255 * 8 else hex(value)
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, (list, collections.deque)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return {_plain_key(item) for item in value}
    if isinstance(value, Mapping):
        return {_plain_key(k): plain(v) for k, v in value.items()}
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return plain(vars(value))
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, complex):
        return complex(value)
    for base in _PLAIN[:4]:
        if isinstance(value, base):
            return plain(base(value))
    if isinstance(value, bytearray):
        return plain(bytes(value))
    return str(value)


class _NoBytes:
    """Pickled in a way that gives ``b""`` and is on torch's list."""

    def __reduce__(self) -> tuple[Any, ...]:
        return codecs.encode, ("", "latin1")


def _plain_key(value: Any) -> Any:
    """`plain`, but for what would be no key any more (a frozen set becomes a set): its text."""
    made = plain(value)
    try:
        hash(made)
    except TypeError:
        return _part_text(value)
    return made


def key_text(path: Path) -> str:
    """A leaf's key: its path's parts joined by ``/``.

    Text parts stand as they are, but for ``~`` (``~0``), ``/`` (``~1``), a leading ``[`` (``~2``) and
    emptiness (``~3``); all other parts, and text that cannot be printed for its surrogates, are
    tagged JSON in brackets, so that 0 and "0" stay apart.
    """
    return "/".join(map(_part_text, path))


def _part_text(part: Any) -> str:
    if type(part) is str and type(_encode(part, ())) is str:
        text = part.replace("~", "~0").replace("/", "~1")
        return "~2" + text[1:] if text.startswith("[") else text or "~3"
    if type(part) is int:
        return f"[{part}]"
    import json

    text = json.dumps(_encode(part, ()), separators=(",", ":"))
    return "[" + text.replace("~", "~0").replace("/", "~1") + "]"


def class_name(cls: type[Any]) -> str:
    """The name under which a class is looked up again, where it is there to be found."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _find_class(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        # Not getattr: modules may import on demand, and classes may run code.
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _refuse(value: Any, path: Path, hint: str) -> StateError:
    key = key_text(path)
    return StateError(f"{key}: cannot store a {type(value).__qualname__}: {hint}", [key])
