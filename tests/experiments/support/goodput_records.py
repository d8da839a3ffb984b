"""Made-up records of goodput runs."""

from __future__ import annotations

from lastgood.experiments.records.goodput import GoodputRecord, GoodputSpec, Incarnation
from tests.experiments.support.records import make_record


def make_goodput(
    system="pccheck", interval_steps=10, repetition=0, *, useful=200, durable=190, faults=(), **spec_changes
):
    """A consistent record: one kill in a window of 40 s, and a load of 0.5 s."""
    like = make_record(system, interval_steps, repetition, proof=True)
    spec = {
        "run": like.spec,
        "window_s": 40.0,
        "failures_s": [20.0],
        "trace_name": "example",
        "trace_sha256": "a" * 64,
        "trace_s": 4000.0,
        "trace_failures": 10,
        "stretch_start_s": 63.0,
        "stretch_s": 400.0,
        **spec_changes,
    }
    incarnation = {"durable_step": 100, "failed_saves": 0}
    first = Incarnation(
        ended="killed",
        uptime_s=20.0,
        start_up_s=3.0,
        load_s=None,
        restored_step=4,
        reached_step=114,
        lost_steps=0,
        loss_equal=None,
        **incarnation,
    )
    last = Incarnation(
        ended="window",
        uptime_s=20.0,
        start_up_s=2.0,
        load_s=0.5,
        restored_step=104,
        reached_step=4 + useful,
        lost_steps=10,
        loss_equal=True,
        **incarnation,
    )
    return GoodputRecord(
        spec=GoodputSpec.model_validate(spec),
        started_at=like.started_at,
        wall_s=50.0,
        where=like.where,
        state_bytes=like.workload.state_bytes,
        parameters=like.workload.parameters,
        first_step=4,
        lives=[first, last],
        window_s=40.0,
        start_up_s=2.0,
        useful_steps=useful,
        durable_steps=durable,
        goodput_iterations_per_s=useful / 40,
        durable_goodput_iterations_per_s=durable / 40,
        raw_goodput_iterations_per_s=useful / 42,
        step_s=0.2,
        load_s=0.5,
        restores=2,
        restores_checked=2,
        faults=list(faults),
    )
