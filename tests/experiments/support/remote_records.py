"""Records of remote checkpoints, without a run."""

from __future__ import annotations

from typing import Any

from lastgood.experiments.records.remote import (
    WAYS,
    ComingBack,
    RemotePart,
    RemoteRecord,
    RemoteSpec,
    SentCheckpoint,
    TrainingBlock,
)
from lastgood.units import MIB
from tests.experiments.support.records import make_record

STATE = 96 * MIB


def spec_of(part: RemotePart = "training", **changes: Any) -> RemoteSpec:
    values: dict[str, Any] = {
        "machine": "testbox",
        "scale": "laptop",
        "part": part,
        "width": 1024,
        "layers": 8,
        "batch": 64,
        "threads": 1,
        "rounds": 3,
        "steps": 40,
        "interval_steps": 5,
        "remote_every": 4,
        "dcp_storage": "s3torchconnector",
        "ranks": 2,
    }
    return RemoteSpec.model_validate({**values, **changes})


def record_of(part: RemotePart = "training", *, equal: bool = True, failed: int = 0, **changes: Any) -> RemoteRecord:
    spec = spec_of(part, **changes)
    own: dict[str, Any] = {}
    if part == "training":
        own["training"] = [
            TrainingBlock(
                way=way,
                steps_per_s=20.0 - 2 * place + 0.2 * number,
                drain_s=0.2 * place,
                durable_steps_per_s=19.0 - 3 * place,
                lag_steps=[3, 9, 21] if way in ("async-save", "tier") else [],
                lag_s=[0.2, 0.5, 1.1] if way in ("async-save", "tier") else [],
                sent=2,
                failed=failed if way == "async-save" else 0,
            )
            for number in range(spec.rounds)
            for place, way in enumerate(WAYS[part])
            if way != "async-save" or spec.dcp_storage
        ]
    elif part == "return":
        own["returns"] = [
            ComingBack(
                way=way,
                ranks=1 if way == "other-ranks" else 2,
                attach_s=0.4 + 0.3 * place + 0.01 * number,
                step_s=0.05,
                restored_step=3,
                equal=equal or way != "s3",
            )
            for number in range(spec.rounds)
            for place, way in enumerate(WAYS[part])
        ]
    else:
        own["checkpoints"] = [
            SentCheckpoint(
                way=way,
                number=number,
                state_bytes=STATE,
                changed_bytes=(STATE, STATE // 5, MIB)[place],
                sent_bytes=STATE if number < 3 else (STATE, 2 * STATE // 5, 8 * MIB)[place],
            )
            for place, way in enumerate(WAYS[part])
            for number in range(1, 3 + spec.rounds)
        ]
    like = make_record()
    return RemoteRecord(
        spec=spec,
        started_at=like.started_at,
        wall_s=60.0,
        where=like.where,
        server="SeaweedFS 4.29, of the run's own",
        state_bytes=STATE,
        raw_write_bytes_per_s=[150.0 * MIB] * 3,
        raw_read_bytes_per_s=[400.0 * MIB] * 3,
        **own,
    )
