from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Quantity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUANTITY_UNSPECIFIED: _ClassVar[Quantity]
    MEAN: _ClassVar[Quantity]
    VARIANCE: _ClassVar[Quantity]
    MOMENTS: _ClassVar[Quantity]
    GRADIENTS: _ClassVar[Quantity]
    STATISTICS: _ClassVar[Quantity]
QUANTITY_UNSPECIFIED: Quantity
MEAN: Quantity
VARIANCE: Quantity
MOMENTS: Quantity
GRADIENTS: Quantity
STATISTICS: Quantity

class Join(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: int
    def __init__(self, batch: _Optional[int] = ...) -> None: ...

class Local(_message.Message):
    __slots__ = ("layer", "quantity", "call", "count", "values")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    QUANTITY_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    layer: str
    quantity: Quantity
    call: int
    count: int
    values: bytes
    def __init__(self, layer: _Optional[str] = ..., quantity: _Optional[_Union[Quantity, str]] = ..., call: _Optional[int] = ..., count: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Request(_message.Message):
    __slots__ = ("join", "local", "leave")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    join: Join
    local: Local
    leave: Leave
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., local: _Optional[_Union[Local, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("values", "count", "batch")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    count: int
    batch: int
    def __init__(self, values: _Optional[bytes] = ..., count: _Optional[int] = ..., batch: _Optional[int] = ...) -> None: ...
