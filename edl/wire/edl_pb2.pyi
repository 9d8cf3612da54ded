from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Version(_message.Message):
    __slots__ = ("era", "commit")
    ERA_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    era: int
    commit: int
    def __init__(self, era: _Optional[int] = ..., commit: _Optional[int] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("version", "shard", "shards")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    version: Version
    shard: int
    shards: int
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., shard: _Optional[int] = ..., shards: _Optional[int] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("node", "host", "port", "shard")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    node: str
    host: str
    port: int
    shard: int
    def __init__(self, node: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("node", "incarnation", "host", "port", "slots", "node_rank", "state_port", "rack", "index", "members", "spare_slots", "devices", "role", "host_id", "lease_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    STATE_PORT_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SPARE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: int
    host: str
    port: int
    slots: int
    node_rank: int
    state_port: int
    rack: str
    index: int
    members: int
    spare_slots: int
    devices: _containers.RepeatedScalarFieldContainer[str]
    role: str
    host_id: str
    lease_s: float
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[int] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., slots: _Optional[int] = ..., node_rank: _Optional[int] = ..., state_port: _Optional[int] = ..., rack: _Optional[str] = ..., index: _Optional[int] = ..., members: _Optional[int] = ..., spare_slots: _Optional[int] = ..., devices: _Optional[_Iterable[str]] = ..., role: _Optional[str] = ..., host_id: _Optional[str] = ..., lease_s: _Optional[float] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("node", "incarnation", "host", "slots", "first_rank", "ports", "places", "role")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: int
    host: str
    slots: int
    first_rank: int
    ports: _containers.RepeatedScalarFieldContainer[int]
    places: _containers.RepeatedScalarFieldContainer[int]
    role: str
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[int] = ..., host: _Optional[str] = ..., slots: _Optional[int] = ..., first_rank: _Optional[int] = ..., ports: _Optional[_Iterable[int]] = ..., places: _Optional[_Iterable[int]] = ..., role: _Optional[str] = ...) -> None: ...

class Settings(_message.Message):
    __slots__ = ("number", "global_batch", "local_batch", "logical_ranks", "lr", "reference", "size", "scale", "factor", "ramp_from", "ramp_begin", "ramp_steps")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_BATCH_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BATCH_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_RANKS_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    RAMP_FROM_FIELD_NUMBER: _ClassVar[int]
    RAMP_BEGIN_FIELD_NUMBER: _ClassVar[int]
    RAMP_STEPS_FIELD_NUMBER: _ClassVar[int]
    number: int
    global_batch: int
    local_batch: int
    logical_ranks: int
    lr: str
    reference: int
    size: int
    scale: float
    factor: float
    ramp_from: float
    ramp_begin: int
    ramp_steps: int
    def __init__(self, number: _Optional[int] = ..., global_batch: _Optional[int] = ..., local_batch: _Optional[int] = ..., logical_ranks: _Optional[int] = ..., lr: _Optional[str] = ..., reference: _Optional[int] = ..., size: _Optional[int] = ..., scale: _Optional[float] = ..., factor: _Optional[float] = ..., ramp_from: _Optional[float] = ..., ramp_begin: _Optional[int] = ..., ramp_steps: _Optional[int] = ...) -> None: ...

class World(_message.Message):
    __slots__ = ("round", "members", "restarts", "era", "restore", "shards", "stored", "sources", "settings")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    ERA_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    round: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    restarts: int
    era: int
    restore: Version
    shards: int
    stored: bool
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    settings: Settings
    def __init__(self, round: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., restarts: _Optional[int] = ..., era: _Optional[int] = ..., restore: _Optional[_Union[Version, _Mapping]] = ..., shards: _Optional[int] = ..., stored: bool = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., settings: _Optional[_Union[Settings, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("node", "round", "rank", "local_rank", "exit_code", "what", "exception", "traceback", "tail", "peer_loss", "slot", "host", "pid", "time_s", "error_file", "final")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    PEER_LOSS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FILE_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    node: str
    round: int
    rank: int
    local_rank: int
    exit_code: int
    what: str
    exception: str
    traceback: str
    tail: str
    peer_loss: bool
    slot: int
    host: str
    pid: int
    time_s: float
    error_file: str
    final: int
    def __init__(self, node: _Optional[str] = ..., round: _Optional[int] = ..., rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., exit_code: _Optional[int] = ..., what: _Optional[str] = ..., exception: _Optional[str] = ..., traceback: _Optional[str] = ..., tail: _Optional[str] = ..., peer_loss: bool = ..., slot: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., time_s: _Optional[float] = ..., error_file: _Optional[str] = ..., final: _Optional[int] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("info", "seen_round", "running_round", "done", "underway", "uses", "saving", "unsaved", "unbroken", "in_doubt")
    INFO_FIELD_NUMBER: _ClassVar[int]
    SEEN_ROUND_FIELD_NUMBER: _ClassVar[int]
    RUNNING_ROUND_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    UNDERWAY_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    SAVING_FIELD_NUMBER: _ClassVar[int]
    UNSAVED_FIELD_NUMBER: _ClassVar[int]
    UNBROKEN_FIELD_NUMBER: _ClassVar[int]
    IN_DOUBT_FIELD_NUMBER: _ClassVar[int]
    info: NodeInfo
    seen_round: int
    running_round: int
    done: bool
    underway: bool
    uses: _containers.RepeatedScalarFieldContainer[int]
    saving: bool
    unsaved: str
    unbroken: bool
    in_doubt: bool
    def __init__(self, info: _Optional[_Union[NodeInfo, _Mapping]] = ..., seen_round: _Optional[int] = ..., running_round: _Optional[int] = ..., done: bool = ..., underway: bool = ..., uses: _Optional[_Iterable[int]] = ..., saving: bool = ..., unsaved: _Optional[str] = ..., unbroken: bool = ..., in_doubt: bool = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("seen_round", "ports", "parked", "holdings", "stored", "stored_sharded", "refused", "stopped_itself", "commit_age_s")
    SEEN_ROUND_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    STORED_SHARDED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STOPPED_ITSELF_FIELD_NUMBER: _ClassVar[int]
    COMMIT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    seen_round: int
    ports: _containers.RepeatedScalarFieldContainer[int]
    parked: bool
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    stored: Version
    stored_sharded: bool
    refused: str
    stopped_itself: bool
    commit_age_s: float
    def __init__(self, seen_round: _Optional[int] = ..., ports: _Optional[_Iterable[int]] = ..., parked: bool = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., stored: _Optional[_Union[Version, _Mapping]] = ..., stored_sharded: bool = ..., refused: _Optional[str] = ..., stopped_itself: bool = ..., commit_age_s: _Optional[float] = ...) -> None: ...

class Preparing(_message.Message):
    __slots__ = ("seen_round", "reason", "holdings", "stopped_itself", "commit_age_s")
    SEEN_ROUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_ITSELF_FIELD_NUMBER: _ClassVar[int]
    COMMIT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    seen_round: int
    reason: str
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    stopped_itself: bool
    commit_age_s: float
    def __init__(self, seen_round: _Optional[int] = ..., reason: _Optional[str] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., stopped_itself: bool = ..., commit_age_s: _Optional[float] = ...) -> None: ...

class Underway(_message.Message):
    __slots__ = ("round", "how", "connect_s", "restore_s")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    CONNECT_S_FIELD_NUMBER: _ClassVar[int]
    RESTORE_S_FIELD_NUMBER: _ClassVar[int]
    round: int
    how: str
    connect_s: float
    restore_s: float
    def __init__(self, round: _Optional[int] = ..., how: _Optional[str] = ..., connect_s: _Optional[float] = ..., restore_s: _Optional[float] = ...) -> None: ...

class Boundary(_message.Message):
    __slots__ = ("round", "hold", "commit")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    round: int
    hold: int
    commit: int
    def __init__(self, round: _Optional[int] = ..., hold: _Optional[int] = ..., commit: _Optional[int] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("version", "where", "error", "took_s", "sharded")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    SHARDED_FIELD_NUMBER: _ClassVar[int]
    version: Version
    where: str
    error: str
    took_s: float
    sharded: bool
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., where: _Optional[str] = ..., error: _Optional[str] = ..., took_s: _Optional[float] = ..., sharded: bool = ...) -> None: ...

class Asked(_message.Message):
    __slots__ = ("purpose", "by", "argument")
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    ARGUMENT_FIELD_NUMBER: _ClassVar[int]
    purpose: str
    by: str
    argument: str
    def __init__(self, purpose: _Optional[str] = ..., by: _Optional[str] = ..., argument: _Optional[str] = ...) -> None: ...

class Hanging(_message.Message):
    __slots__ = ("round", "what", "for_s", "learnt", "workers")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    LEARNT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    round: int
    what: str
    for_s: float
    learnt: bool
    workers: _containers.RepeatedCompositeFieldContainer[Failure]
    def __init__(self, round: _Optional[int] = ..., what: _Optional[str] = ..., for_s: _Optional[float] = ..., learnt: bool = ..., workers: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ...) -> None: ...

class HangLimit(_message.Message):
    __slots__ = ("limit_s", "pauses", "needed")
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    PAUSES_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    limit_s: float
    pauses: int
    needed: int
    def __init__(self, limit_s: _Optional[float] = ..., pauses: _Optional[int] = ..., needed: _Optional[int] = ...) -> None: ...

class WorkerFailed(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class WorkersDone(_message.Message):
    __slots__ = ("round", "saving", "unsaved")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SAVING_FIELD_NUMBER: _ClassVar[int]
    UNSAVED_FIELD_NUMBER: _ClassVar[int]
    round: int
    saving: bool
    unsaved: str
    def __init__(self, round: _Optional[int] = ..., saving: bool = ..., unsaved: _Optional[str] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason", "grace_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    reason: str
    grace_s: float
    def __init__(self, reason: _Optional[str] = ..., grace_s: _Optional[float] = ...) -> None: ...

class NotKept(_message.Message):
    __slots__ = ("why",)
    WHY_FIELD_NUMBER: _ClassVar[int]
    why: str
    def __init__(self, why: _Optional[str] = ...) -> None: ...

class NotLogged(_message.Message):
    __slots__ = ("why",)
    WHY_FIELD_NUMBER: _ClassVar[int]
    why: str
    def __init__(self, why: _Optional[str] = ...) -> None: ...

class Alarm(_message.Message):
    __slots__ = ("name", "about", "severity", "text", "node", "shared")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    name: str
    about: str
    severity: str
    text: str
    node: str
    shared: bool
    def __init__(self, name: _Optional[str] = ..., about: _Optional[str] = ..., severity: _Optional[str] = ..., text: _Optional[str] = ..., node: _Optional[str] = ..., shared: bool = ...) -> None: ...

class Alarms(_message.Message):
    __slots__ = ("alarms",)
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    alarms: _containers.RepeatedCompositeFieldContainer[Alarm]
    def __init__(self, alarms: _Optional[_Iterable[_Union[Alarm, _Mapping]]] = ...) -> None: ...

class ServiceFromWorker(_message.Message):
    __slots__ = ("service", "slot", "round", "body")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    service: str
    slot: int
    round: int
    body: str
    def __init__(self, service: _Optional[str] = ..., slot: _Optional[int] = ..., round: _Optional[int] = ..., body: _Optional[str] = ...) -> None: ...

class RankPace(_message.Message):
    __slots__ = ("slot", "step_s", "slowest_s", "peers_share", "commit_share", "data_share", "stopped_share", "starved_share", "idle_share", "samples")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_S_FIELD_NUMBER: _ClassVar[int]
    PEERS_SHARE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SHARE_FIELD_NUMBER: _ClassVar[int]
    DATA_SHARE_FIELD_NUMBER: _ClassVar[int]
    STOPPED_SHARE_FIELD_NUMBER: _ClassVar[int]
    STARVED_SHARE_FIELD_NUMBER: _ClassVar[int]
    IDLE_SHARE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    step_s: float
    slowest_s: float
    peers_share: float
    commit_share: float
    data_share: float
    stopped_share: float
    starved_share: float
    idle_share: float
    samples: float
    def __init__(self, slot: _Optional[int] = ..., step_s: _Optional[float] = ..., slowest_s: _Optional[float] = ..., peers_share: _Optional[float] = ..., commit_share: _Optional[float] = ..., data_share: _Optional[float] = ..., stopped_share: _Optional[float] = ..., starved_share: _Optional[float] = ..., idle_share: _Optional[float] = ..., samples: _Optional[float] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("round", "commit", "step_s", "age_s", "commit_share", "data_share", "ranks", "holders")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SHARE_FIELD_NUMBER: _ClassVar[int]
    DATA_SHARE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    round: int
    commit: int
    step_s: float
    age_s: float
    commit_share: float
    data_share: float
    ranks: _containers.RepeatedCompositeFieldContainer[RankPace]
    holders: int
    def __init__(self, round: _Optional[int] = ..., commit: _Optional[int] = ..., step_s: _Optional[float] = ..., age_s: _Optional[float] = ..., commit_share: _Optional[float] = ..., data_share: _Optional[float] = ..., ranks: _Optional[_Iterable[_Union[RankPace, _Mapping]]] = ..., holders: _Optional[int] = ...) -> None: ...

class LinkFinding(_message.Message):
    __slots__ = ("node", "error", "latency_s", "bytes_per_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    node: str
    error: str
    latency_s: float
    bytes_per_s: float
    def __init__(self, node: _Optional[str] = ..., error: _Optional[str] = ..., latency_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class SlotFinding(_message.Message):
    __slots__ = ("slot", "error")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    slot: int
    error: str
    def __init__(self, slot: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class HealthChecked(_message.Message):
    __slots__ = ("number", "stage", "kind", "product_s", "error", "slots", "links", "remarks")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PRODUCT_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    REMARKS_FIELD_NUMBER: _ClassVar[int]
    number: int
    stage: int
    kind: str
    product_s: float
    error: str
    slots: _containers.RepeatedCompositeFieldContainer[SlotFinding]
    links: _containers.RepeatedCompositeFieldContainer[LinkFinding]
    remarks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., stage: _Optional[int] = ..., kind: _Optional[str] = ..., product_s: _Optional[float] = ..., error: _Optional[str] = ..., slots: _Optional[_Iterable[_Union[SlotFinding, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkFinding, _Mapping]]] = ..., remarks: _Optional[_Iterable[str]] = ...) -> None: ...

class FromAgent(_message.Message):
    __slots__ = ("attach", "ready", "worker_failed", "workers_done", "leaving", "preparing", "underway", "boundary", "kept", "asked", "hanging", "service_from_worker", "pace", "not_kept", "not_logged", "alarms", "hang_limit", "health_checked")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WORKER_FAILED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_DONE_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PREPARING_FIELD_NUMBER: _ClassVar[int]
    UNDERWAY_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    HANGING_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FROM_WORKER_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    NOT_KEPT_FIELD_NUMBER: _ClassVar[int]
    NOT_LOGGED_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    HANG_LIMIT_FIELD_NUMBER: _ClassVar[int]
    HEALTH_CHECKED_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    ready: Ready
    worker_failed: WorkerFailed
    workers_done: WorkersDone
    leaving: Leaving
    preparing: Preparing
    underway: Underway
    boundary: Boundary
    kept: Kept
    asked: Asked
    hanging: Hanging
    service_from_worker: ServiceFromWorker
    pace: Pace
    not_kept: NotKept
    not_logged: NotLogged
    alarms: Alarms
    hang_limit: HangLimit
    health_checked: HealthChecked
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., worker_failed: _Optional[_Union[WorkerFailed, _Mapping]] = ..., workers_done: _Optional[_Union[WorkersDone, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., preparing: _Optional[_Union[Preparing, _Mapping]] = ..., underway: _Optional[_Union[Underway, _Mapping]] = ..., boundary: _Optional[_Union[Boundary, _Mapping]] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ..., asked: _Optional[_Union[Asked, _Mapping]] = ..., hanging: _Optional[_Union[Hanging, _Mapping]] = ..., service_from_worker: _Optional[_Union[ServiceFromWorker, _Mapping]] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., not_kept: _Optional[_Union[NotKept, _Mapping]] = ..., not_logged: _Optional[_Union[NotLogged, _Mapping]] = ..., alarms: _Optional[_Union[Alarms, _Mapping]] = ..., hang_limit: _Optional[_Union[HangLimit, _Mapping]] = ..., health_checked: _Optional[_Union[HealthChecked, _Mapping]] = ...) -> None: ...

class StopRound(_message.Message):
    __slots__ = ("round", "reason", "dump")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DUMP_FIELD_NUMBER: _ClassVar[int]
    round: int
    reason: str
    dump: bool
    def __init__(self, round: _Optional[int] = ..., reason: _Optional[str] = ..., dump: bool = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("round", "hold", "binding")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    BINDING_FIELD_NUMBER: _ClassVar[int]
    round: int
    hold: int
    binding: bool
    def __init__(self, round: _Optional[int] = ..., hold: _Optional[int] = ..., binding: bool = ...) -> None: ...

class Switch(_message.Message):
    __slots__ = ("round", "hold", "commit", "purpose", "reason", "settings")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    round: int
    hold: int
    commit: int
    purpose: str
    reason: str
    settings: Settings
    def __init__(self, round: _Optional[int] = ..., hold: _Optional[int] = ..., commit: _Optional[int] = ..., purpose: _Optional[str] = ..., reason: _Optional[str] = ..., settings: _Optional[_Union[Settings, _Mapping]] = ...) -> None: ...

class Prestart(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class LoadState(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class KeepWith(_message.Message):
    __slots__ = ("node", "host", "port")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    node: str
    host: str
    port: int
    def __init__(self, node: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class Dismissed(_message.Message):
    __slots__ = ("reason", "needed", "save")
    REASON_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    needed: bool
    save: bool
    def __init__(self, reason: _Optional[str] = ..., needed: bool = ..., save: bool = ...) -> None: ...

class StartRound(_message.Message):
    __slots__ = ("world", "reason")
    WORLD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    world: World
    reason: str
    def __init__(self, world: _Optional[_Union[World, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("exit_code", "reason", "failures")
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    reason: str
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    def __init__(self, exit_code: _Optional[int] = ..., reason: _Optional[str] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ...) -> None: ...

class Expelled(_message.Message):
    __slots__ = ("reason", "exit_code")
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    exit_code: int
    def __init__(self, reason: _Optional[str] = ..., exit_code: _Optional[int] = ...) -> None: ...

class ServiceToWorker(_message.Message):
    __slots__ = ("service", "slot", "body")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    service: str
    slot: int
    body: str
    def __init__(self, service: _Optional[str] = ..., slot: _Optional[int] = ..., body: _Optional[str] = ...) -> None: ...

class Depart(_message.Message):
    __slots__ = ("reason", "deadline_s", "mode")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    deadline_s: float
    mode: str
    def __init__(self, reason: _Optional[str] = ..., deadline_s: _Optional[float] = ..., mode: _Optional[str] = ...) -> None: ...

class Idle(_message.Message):
    __slots__ = ("reason", "save")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    save: Version
    def __init__(self, reason: _Optional[str] = ..., save: _Optional[_Union[Version, _Mapping]] = ...) -> None: ...

class UseSlots(_message.Message):
    __slots__ = ("slots", "reason")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    def __init__(self, slots: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ...) -> None: ...

class HealthPeer(_message.Message):
    __slots__ = ("node", "host", "port")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    node: str
    host: str
    port: int
    def __init__(self, node: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class CheckHealth(_message.Message):
    __slots__ = ("number", "stage", "port", "peers", "size", "timeout_s", "reason")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    number: int
    stage: int
    port: int
    peers: _containers.RepeatedCompositeFieldContainer[HealthPeer]
    size: int
    timeout_s: float
    reason: str
    def __init__(self, number: _Optional[int] = ..., stage: _Optional[int] = ..., port: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[HealthPeer, _Mapping]]] = ..., size: _Optional[int] = ..., timeout_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class FromMaster(_message.Message):
    __slots__ = ("stop_round", "start_round", "finish", "expelled", "hold", "switch", "prestart", "load_state", "keep_with", "dismissed", "service_to_worker", "depart", "idle", "use_slots", "check_health")
    STOP_ROUND_FIELD_NUMBER: _ClassVar[int]
    START_ROUND_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    EXPELLED_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    PRESTART_FIELD_NUMBER: _ClassVar[int]
    LOAD_STATE_FIELD_NUMBER: _ClassVar[int]
    KEEP_WITH_FIELD_NUMBER: _ClassVar[int]
    DISMISSED_FIELD_NUMBER: _ClassVar[int]
    SERVICE_TO_WORKER_FIELD_NUMBER: _ClassVar[int]
    DEPART_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    USE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CHECK_HEALTH_FIELD_NUMBER: _ClassVar[int]
    stop_round: StopRound
    start_round: StartRound
    finish: Finish
    expelled: Expelled
    hold: Hold
    switch: Switch
    prestart: Prestart
    load_state: LoadState
    keep_with: KeepWith
    dismissed: Dismissed
    service_to_worker: ServiceToWorker
    depart: Depart
    idle: Idle
    use_slots: UseSlots
    check_health: CheckHealth
    def __init__(self, stop_round: _Optional[_Union[StopRound, _Mapping]] = ..., start_round: _Optional[_Union[StartRound, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., expelled: _Optional[_Union[Expelled, _Mapping]] = ..., hold: _Optional[_Union[Hold, _Mapping]] = ..., switch: _Optional[_Union[Switch, _Mapping]] = ..., prestart: _Optional[_Union[Prestart, _Mapping]] = ..., load_state: _Optional[_Union[LoadState, _Mapping]] = ..., keep_with: _Optional[_Union[KeepWith, _Mapping]] = ..., dismissed: _Optional[_Union[Dismissed, _Mapping]] = ..., service_to_worker: _Optional[_Union[ServiceToWorker, _Mapping]] = ..., depart: _Optional[_Union[Depart, _Mapping]] = ..., idle: _Optional[_Union[Idle, _Mapping]] = ..., use_slots: _Optional[_Union[UseSlots, _Mapping]] = ..., check_health: _Optional[_Union[CheckHealth, _Mapping]] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HistoryEntry(_message.Message):
    __slots__ = ("number", "at_s", "kind", "text", "node", "round", "severity")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    number: int
    at_s: float
    kind: str
    text: str
    node: str
    round: int
    severity: str
    def __init__(self, number: _Optional[int] = ..., at_s: _Optional[float] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ..., node: _Optional[str] = ..., round: _Optional[int] = ..., severity: _Optional[str] = ...) -> None: ...

class NodeView(_message.Message):
    __slots__ = ("node", "host", "slots", "state", "attached", "position", "first_rank", "underway", "how", "draining", "index", "places", "spare_slots", "step_s", "members", "ranks", "hang_limit_s", "hang_pauses", "hang_needed")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    UNDERWAY_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    SPARE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    HANG_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    HANG_PAUSES_FIELD_NUMBER: _ClassVar[int]
    HANG_NEEDED_FIELD_NUMBER: _ClassVar[int]
    node: str
    host: str
    slots: int
    state: str
    attached: bool
    position: int
    first_rank: int
    underway: bool
    how: str
    draining: bool
    index: int
    places: _containers.RepeatedScalarFieldContainer[int]
    spare_slots: int
    step_s: float
    members: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankPace]
    hang_limit_s: float
    hang_pauses: int
    hang_needed: int
    def __init__(self, node: _Optional[str] = ..., host: _Optional[str] = ..., slots: _Optional[int] = ..., state: _Optional[str] = ..., attached: bool = ..., position: _Optional[int] = ..., first_rank: _Optional[int] = ..., underway: bool = ..., how: _Optional[str] = ..., draining: bool = ..., index: _Optional[int] = ..., places: _Optional[_Iterable[int]] = ..., spare_slots: _Optional[int] = ..., step_s: _Optional[float] = ..., members: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankPace, _Mapping]]] = ..., hang_limit_s: _Optional[float] = ..., hang_pauses: _Optional[int] = ..., hang_needed: _Optional[int] = ...) -> None: ...

class DroppedSlot(_message.Message):
    __slots__ = ("node", "host", "slot", "device", "why", "round", "host_id", "by")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    node: str
    host: str
    slot: int
    device: str
    why: str
    round: int
    host_id: str
    by: str
    def __init__(self, node: _Optional[str] = ..., host: _Optional[str] = ..., slot: _Optional[int] = ..., device: _Optional[str] = ..., why: _Optional[str] = ..., round: _Optional[int] = ..., host_id: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...

class Count(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class ServiceShare(_message.Message):
    __slots__ = ("node", "workers", "leases", "records")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    node: str
    workers: int
    leases: int
    records: int
    def __init__(self, node: _Optional[str] = ..., workers: _Optional[int] = ..., leases: _Optional[int] = ..., records: _Optional[int] = ...) -> None: ...

class ServiceView(_message.Message):
    __slots__ = ("service", "name", "text", "counts", "shares")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    service: str
    name: str
    text: str
    counts: _containers.RepeatedCompositeFieldContainer[Count]
    shares: _containers.RepeatedCompositeFieldContainer[ServiceShare]
    def __init__(self, service: _Optional[str] = ..., name: _Optional[str] = ..., text: _Optional[str] = ..., counts: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., shares: _Optional[_Iterable[_Union[ServiceShare, _Mapping]]] = ...) -> None: ...

class HealthView(_message.Message):
    __slots__ = ("node", "host", "state", "why", "excluded", "age_s", "expires_s", "devices", "host_id")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    node: str
    host: str
    state: str
    why: str
    excluded: bool
    age_s: float
    expires_s: float
    devices: _containers.RepeatedScalarFieldContainer[str]
    host_id: str
    def __init__(self, node: _Optional[str] = ..., host: _Optional[str] = ..., state: _Optional[str] = ..., why: _Optional[str] = ..., excluded: bool = ..., age_s: _Optional[float] = ..., expires_s: _Optional[float] = ..., devices: _Optional[_Iterable[str]] = ..., host_id: _Optional[str] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job", "phase", "round", "world_size", "reason", "nnodes", "fault_tolerance", "restarts_used", "restarts_allowed", "master", "nodes", "history", "failures", "era", "restored", "saved", "saved_in", "boundary", "kill", "services", "flaws", "settings", "scale", "dropped", "warnings", "goodput", "commit", "alarms", "hang_timeout", "health", "holders")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NNODES_FIELD_NUMBER: _ClassVar[int]
    FAULT_TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_USED_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_ALLOWED_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    ERA_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    SAVED_IN_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    FLAWS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    HANG_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    job: str
    phase: str
    round: int
    world_size: int
    reason: str
    nnodes: str
    fault_tolerance: str
    restarts_used: int
    restarts_allowed: int
    master: str
    nodes: _containers.RepeatedCompositeFieldContainer[NodeView]
    history: _containers.RepeatedCompositeFieldContainer[HistoryEntry]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    era: int
    restored: Version
    saved: Version
    saved_in: str
    boundary: str
    kill: str
    services: _containers.RepeatedCompositeFieldContainer[ServiceView]
    flaws: _containers.RepeatedScalarFieldContainer[str]
    settings: Settings
    scale: ScaleView
    dropped: _containers.RepeatedCompositeFieldContainer[DroppedSlot]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    goodput: _containers.RepeatedCompositeFieldContainer[Count]
    commit: int
    alarms: _containers.RepeatedCompositeFieldContainer[Alarm]
    hang_timeout: str
    health: _containers.RepeatedCompositeFieldContainer[HealthView]
    holders: int
    def __init__(self, job: _Optional[str] = ..., phase: _Optional[str] = ..., round: _Optional[int] = ..., world_size: _Optional[int] = ..., reason: _Optional[str] = ..., nnodes: _Optional[str] = ..., fault_tolerance: _Optional[str] = ..., restarts_used: _Optional[int] = ..., restarts_allowed: _Optional[int] = ..., master: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[NodeView, _Mapping]]] = ..., history: _Optional[_Iterable[_Union[HistoryEntry, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., era: _Optional[int] = ..., restored: _Optional[_Union[Version, _Mapping]] = ..., saved: _Optional[_Union[Version, _Mapping]] = ..., saved_in: _Optional[str] = ..., boundary: _Optional[str] = ..., kill: _Optional[str] = ..., services: _Optional[_Iterable[_Union[ServiceView, _Mapping]]] = ..., flaws: _Optional[_Iterable[str]] = ..., settings: _Optional[_Union[Settings, _Mapping]] = ..., scale: _Optional[_Union[ScaleView, _Mapping]] = ..., dropped: _Optional[_Iterable[_Union[DroppedSlot, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ..., goodput: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., commit: _Optional[int] = ..., alarms: _Optional[_Iterable[_Union[Alarm, _Mapping]]] = ..., hang_timeout: _Optional[str] = ..., health: _Optional[_Iterable[_Union[HealthView, _Mapping]]] = ..., holders: _Optional[int] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("after", "follow")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    after: int
    follow: bool
    def __init__(self, after: _Optional[int] = ..., follow: bool = ...) -> None: ...

class OutputRequest(_message.Message):
    __slots__ = ("ranks", "lines", "after")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    lines: int
    after: int
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., lines: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class StacksRequest(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class OptionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OptionValue(_message.Message):
    __slots__ = ("flag", "value", "source", "origin", "default")
    FLAG_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_FIELD_NUMBER: _ClassVar[int]
    flag: str
    value: str
    source: str
    origin: str
    default: str
    def __init__(self, flag: _Optional[str] = ..., value: _Optional[str] = ..., source: _Optional[str] = ..., origin: _Optional[str] = ..., default: _Optional[str] = ...) -> None: ...

class OptionValues(_message.Message):
    __slots__ = ("options",)
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _containers.RepeatedCompositeFieldContainer[OptionValue]
    def __init__(self, options: _Optional[_Iterable[_Union[OptionValue, _Mapping]]] = ...) -> None: ...

class OutputLine(_message.Message):
    __slots__ = ("rank", "round", "stderr", "text")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    round: int
    stderr: bool
    text: str
    def __init__(self, rank: _Optional[int] = ..., round: _Optional[int] = ..., stderr: bool = ..., text: _Optional[str] = ...) -> None: ...

class OutputLines(_message.Message):
    __slots__ = ("lines", "next", "gap")
    LINES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[OutputLine]
    next: int
    gap: bool
    def __init__(self, lines: _Optional[_Iterable[_Union[OutputLine, _Mapping]]] = ..., next: _Optional[int] = ..., gap: bool = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("text", "ok")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    text: str
    ok: bool
    def __init__(self, text: _Optional[str] = ..., ok: bool = ...) -> None: ...

class Resize(_message.Message):
    __slots__ = ("nodes", "by", "reason", "revision", "key", "external", "auto")
    NODES_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_FIELD_NUMBER: _ClassVar[int]
    AUTO_FIELD_NUMBER: _ClassVar[int]
    nodes: int
    by: str
    reason: str
    revision: int
    key: str
    external: bool
    auto: bool
    def __init__(self, nodes: _Optional[int] = ..., by: _Optional[str] = ..., reason: _Optional[str] = ..., revision: _Optional[int] = ..., key: _Optional[str] = ..., external: bool = ..., auto: bool = ...) -> None: ...

class SetBounds(_message.Message):
    __slots__ = ("minimum", "maximum", "by", "reason", "revision")
    MINIMUM_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    minimum: int
    maximum: int
    by: str
    reason: str
    revision: int
    def __init__(self, minimum: _Optional[int] = ..., maximum: _Optional[int] = ..., by: _Optional[str] = ..., reason: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("nodes", "by", "reason", "deadline_s", "mode")
    NODES_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    by: str
    reason: str
    deadline_s: float
    mode: str
    def __init__(self, nodes: _Optional[_Iterable[str]] = ..., by: _Optional[str] = ..., reason: _Optional[str] = ..., deadline_s: _Optional[float] = ..., mode: _Optional[str] = ...) -> None: ...

class Cordon(_message.Message):
    __slots__ = ("node", "cordoned", "by", "reason", "device")
    NODE_FIELD_NUMBER: _ClassVar[int]
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    node: str
    cordoned: bool
    by: str
    reason: str
    device: str
    def __init__(self, node: _Optional[str] = ..., cordoned: bool = ..., by: _Optional[str] = ..., reason: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class Suspend(_message.Message):
    __slots__ = ("suspended", "by", "reason")
    SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    suspended: bool
    by: str
    reason: str
    def __init__(self, suspended: bool = ..., by: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("verdict", "text", "revision", "generation")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    verdict: str
    text: str
    revision: int
    generation: int
    def __init__(self, verdict: _Optional[str] = ..., text: _Optional[str] = ..., revision: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class ScaleView(_message.Message):
    __slots__ = ("minimum", "maximum", "unit", "desired", "nodes", "revision", "generation", "observed", "by", "reason", "suspended", "cordoned", "owner", "waiting", "need_s", "proposal", "proposal_reason", "asked")
    MINIMUM_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    NEED_S_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_REASON_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    minimum: int
    maximum: int
    unit: int
    desired: int
    nodes: int
    revision: int
    generation: int
    observed: int
    by: str
    reason: str
    suspended: bool
    cordoned: _containers.RepeatedScalarFieldContainer[str]
    owner: str
    waiting: str
    need_s: float
    proposal: int
    proposal_reason: str
    asked: int
    def __init__(self, minimum: _Optional[int] = ..., maximum: _Optional[int] = ..., unit: _Optional[int] = ..., desired: _Optional[int] = ..., nodes: _Optional[int] = ..., revision: _Optional[int] = ..., generation: _Optional[int] = ..., observed: _Optional[int] = ..., by: _Optional[str] = ..., reason: _Optional[str] = ..., suspended: bool = ..., cordoned: _Optional[_Iterable[str]] = ..., owner: _Optional[str] = ..., waiting: _Optional[str] = ..., need_s: _Optional[float] = ..., proposal: _Optional[int] = ..., proposal_reason: _Optional[str] = ..., asked: _Optional[int] = ...) -> None: ...
