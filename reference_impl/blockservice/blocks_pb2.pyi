from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Disposition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DISPOSITION_UNSPECIFIED: _ClassVar[Disposition]
    APPLIED: _ClassVar[Disposition]
    REPLAYED: _ClassVar[Disposition]
    REFUSED: _ClassVar[Disposition]
    IN_PROGRESS: _ClassVar[Disposition]
DISPOSITION_UNSPECIFIED: Disposition
APPLIED: Disposition
REPLAYED: Disposition
REFUSED: Disposition
IN_PROGRESS: Disposition

class Operation(_message.Message):
    __slots__ = ("operation_id", "issued_ms")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    ISSUED_MS_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    issued_ms: int
    def __init__(self, operation_id: _Optional[str] = ..., issued_ms: _Optional[int] = ...) -> None: ...

class GetMetadataRequest(_message.Message):
    __slots__ = ("block_group_id",)
    BLOCK_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    block_group_id: str
    def __init__(self, block_group_id: _Optional[str] = ...) -> None: ...

class ListGroupsRequest(_message.Message):
    __slots__ = ("state", "limit", "after")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    state: str
    limit: int
    after: str
    def __init__(self, state: _Optional[str] = ..., limit: _Optional[int] = ..., after: _Optional[str] = ...) -> None: ...

class ListGroupsReply(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Metadata]
    def __init__(self, groups: _Optional[_Iterable[_Union[Metadata, _Mapping]]] = ...) -> None: ...

class Metadata(_message.Message):
    __slots__ = ("block_group_id", "state", "location", "epoch", "size_bytes", "token_start", "token_end", "checksum", "pins", "reserved")
    BLOCK_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    block_group_id: str
    state: str
    location: str
    epoch: int
    size_bytes: int
    token_start: int
    token_end: int
    checksum: str
    pins: int
    reserved: int
    def __init__(self, block_group_id: _Optional[str] = ..., state: _Optional[str] = ..., location: _Optional[str] = ..., epoch: _Optional[int] = ..., size_bytes: _Optional[int] = ..., token_start: _Optional[int] = ..., token_end: _Optional[int] = ..., checksum: _Optional[str] = ..., pins: _Optional[int] = ..., reserved: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("operation", "block_group_id", "epoch", "slots")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    block_group_id: str
    epoch: int
    slots: int
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ..., block_group_id: _Optional[str] = ..., epoch: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("operation", "block_group_id", "epoch", "request_id")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    block_group_id: str
    epoch: int
    request_id: str
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ..., block_group_id: _Optional[str] = ..., epoch: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("operation", "block_group_id", "epoch")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    block_group_id: str
    epoch: int
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ..., block_group_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class PrepareGetRequest(_message.Message):
    __slots__ = ("operation", "block_group_id", "epoch", "request_id")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    block_group_id: str
    epoch: int
    request_id: str
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ..., block_group_id: _Optional[str] = ..., epoch: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class StartMigrateRequest(_message.Message):
    __slots__ = ("operation", "block_group_id", "epoch", "src", "dst")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SRC_FIELD_NUMBER: _ClassVar[int]
    DST_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    block_group_id: str
    epoch: int
    src: str
    dst: str
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ..., block_group_id: _Optional[str] = ..., epoch: _Optional[int] = ..., src: _Optional[str] = ..., dst: _Optional[str] = ...) -> None: ...

class CancelMigrateRequest(_message.Message):
    __slots__ = ("operation", "block_group_id", "epoch", "migration_id")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MIGRATION_ID_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    block_group_id: str
    epoch: int
    migration_id: str
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ..., block_group_id: _Optional[str] = ..., epoch: _Optional[int] = ..., migration_id: _Optional[str] = ...) -> None: ...

class GetOperationRequest(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("disposition", "replayed", "refusal", "message", "field", "epoch", "state", "location", "reserved", "pins", "migration", "place")
    DISPOSITION_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    disposition: Disposition
    replayed: bool
    refusal: str
    message: str
    field: str
    epoch: int
    state: str
    location: str
    reserved: int
    pins: int
    migration: Migration
    place: Place
    def __init__(self, disposition: _Optional[_Union[Disposition, str]] = ..., replayed: _Optional[bool] = ..., refusal: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[str] = ..., location: _Optional[str] = ..., reserved: _Optional[int] = ..., pins: _Optional[int] = ..., migration: _Optional[_Union[Migration, _Mapping]] = ..., place: _Optional[_Union[Place, _Mapping]] = ...) -> None: ...

class Migration(_message.Message):
    __slots__ = ("operation_id", "block_group_id", "src", "dst", "epoch", "status", "reason")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SRC_FIELD_NUMBER: _ClassVar[int]
    DST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    block_group_id: str
    src: str
    dst: str
    epoch: int
    status: str
    reason: str
    def __init__(self, operation_id: _Optional[str] = ..., block_group_id: _Optional[str] = ..., src: _Optional[str] = ..., dst: _Optional[str] = ..., epoch: _Optional[int] = ..., status: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("node", "handoff", "size_bytes", "checksum", "transfer_token", "expires_ms")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    node: str
    handoff: str
    size_bytes: int
    checksum: str
    transfer_token: str
    expires_ms: int
    def __init__(self, node: _Optional[str] = ..., handoff: _Optional[str] = ..., size_bytes: _Optional[int] = ..., checksum: _Optional[str] = ..., transfer_token: _Optional[str] = ..., expires_ms: _Optional[int] = ...) -> None: ...

class OperationState(_message.Message):
    __slots__ = ("known", "answer")
    class Known(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KNOWN_UNSPECIFIED: _ClassVar[OperationState.Known]
        UNKNOWN: _ClassVar[OperationState.Known]
        IN_PROGRESS: _ClassVar[OperationState.Known]
        DONE: _ClassVar[OperationState.Known]
        EXPIRED: _ClassVar[OperationState.Known]
    KNOWN_UNSPECIFIED: OperationState.Known
    UNKNOWN: OperationState.Known
    IN_PROGRESS: OperationState.Known
    DONE: OperationState.Known
    EXPIRED: OperationState.Known
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    known: OperationState.Known
    answer: Answer
    def __init__(self, known: _Optional[_Union[OperationState.Known, str]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ...) -> None: ...

class AcceptRequest(_message.Message):
    __slots__ = ("operation_id", "tenant", "group", "digests", "place")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    tenant: str
    group: Metadata
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    place: Place
    def __init__(self, operation_id: _Optional[str] = ..., tenant: _Optional[str] = ..., group: _Optional[_Union[Metadata, _Mapping]] = ..., digests: _Optional[_Iterable[bytes]] = ..., place: _Optional[_Union[Place, _Mapping]] = ...) -> None: ...

class SettleRequest(_message.Message):
    __slots__ = ("operation_id", "tenant", "status")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    tenant: str
    status: str
    def __init__(self, operation_id: _Optional[str] = ..., tenant: _Optional[str] = ..., status: _Optional[str] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("copy", "reason")
    class Copy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        COPY_UNSPECIFIED: _ClassVar[Accepted.Copy]
        ARRIVING: _ClassVar[Accepted.Copy]
        COPIED: _ClassVar[Accepted.Copy]
        FAILED: _ClassVar[Accepted.Copy]
        SETTLED: _ClassVar[Accepted.Copy]
    COPY_UNSPECIFIED: Accepted.Copy
    ARRIVING: Accepted.Copy
    COPIED: Accepted.Copy
    FAILED: Accepted.Copy
    SETTLED: Accepted.Copy
    COPY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    copy: Accepted.Copy
    reason: str
    def __init__(self, copy: _Optional[_Union[Accepted.Copy, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class ArmRequest(_message.Message):
    __slots__ = ("point", "action", "times", "skip", "seconds", "method")
    POINT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    point: str
    action: str
    times: int
    skip: int
    seconds: float
    method: str
    def __init__(self, point: _Optional[str] = ..., action: _Optional[str] = ..., times: _Optional[int] = ..., skip: _Optional[int] = ..., seconds: _Optional[float] = ..., method: _Optional[str] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FailPointReport(_message.Message):
    __slots__ = ("acted", "armed", "pid")
    class ActedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ACTED_FIELD_NUMBER: _ClassVar[int]
    ARMED_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    acted: _containers.ScalarMap[str, int]
    armed: int
    pid: int
    def __init__(self, acted: _Optional[_Mapping[str, int]] = ..., armed: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...
