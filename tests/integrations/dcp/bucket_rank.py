"""Ranks that save and load through DCP in a bucket. Run as: bucket_rank.py. See `forked_ranks`."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from lastgood.integrations.dcp import Credentials, LastgoodReader, LastgoodWriter, S3Options, bucket, sources
from tests.integrations.dcp.dcp_rank import (
    WORKS,
    Dying,
    differences,
    emptied,
    loaded,
    loaded_alone,
    make_state,
    one_rank,
    refused,
    save,
)
from tests.integrations.forked_ranks import serve


def options_of(asked):
    return S3Options(
        region="us-east-1",
        endpoint_url=asked["endpoint"],
        credentials=Credentials(*asked["keys"]),
        retries=2,
        retry_s=5.0,
        request_s=10.0,
    )


def in_bucket(rank, asked):
    """Save and load; by all ranks together with plans that are cached, and each by itself."""
    options, url = options_of(asked), asked["url"]
    found = {}
    for how in asked["hows"]:
        state = make_state(len(how))
        place = f"{url}/{how}"
        save(state, LastgoodWriter(place, s3=options, timeout_s=20), how)
        found[how] = loaded(state, LastgoodReader(place, s3=options, timeout_s=20))
    if asked.get("cached"):
        for seed, shapes in ((1, None), (2, None), (3, {"rows": (4, 2)})):
            state, place = make_state(seed, shapes), f"{url}/cached-{seed}"
            planner = DefaultSavePlanner(enable_plan_caching=True)
            save(state, LastgoodWriter(place, s3=options, timeout_s=20), planner=planner)
            found[f"cached {seed}"] = loaded(state, LastgoodReader(place, s3=options, timeout_s=20))
        mine, place = {"mine": torch.full((3,), float(rank)), "rank": rank}, f"{url}/together"
        for _ in range(2):
            save(mine, LastgoodWriter(place, s3=options, timeout_s=20), use_collectives=False)
            found["by themselves"] = loaded(mine, LastgoodReader(place, s3=options, timeout_s=20))
    yield found


def loads_from_bucket(rank, asked):
    """Load what another number of ranks wrote, placed in another way."""
    del rank
    state = make_state(asked["seed"], None, asked["placed"])
    yield loaded(state, LastgoodReader(asked["url"], s3=options_of(asked), timeout_s=20))


def bad_day_in_bucket(rank, asked):
    """An older checkpoint is there; then one rank dies or fails at a place. What each survivor is told."""
    options, url = options_of(asked), asked["url"]
    older, state = make_state(1), make_state(2)
    save(older, LastgoodWriter(url, s3=options, timeout_s=20))
    yield "saved"
    planner, real = None, (bucket.send_stream, bucket.commit_parts)
    if rank == asked["victim"]:

        def strike(*_args, **_kwargs):
            if asked["dies"]:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(5, "Input/output error")

        if asked["where"] == "plan":
            planner = Dying(asked["dies"])
        elif asked["where"] == "write":
            bucket.send_stream = strike
        elif asked["where"] == "finish":
            bucket.commit_parts = strike
        elif asked["where"] == "elsewhere":
            options = S3Options(
                region="us-east-1", endpoint_url=asked["endpoint"], credentials=Credentials("another", "one's keys")
            )
    found = refused(lambda: save(state, LastgoodWriter(url, s3=options, timeout_s=asked["timeout_s"]), planner=planner))
    alone = LastgoodReader(url, s3=options_of(asked), timeout_s=20)
    found["older"] = loaded_alone(older, alone)
    yield found
    if asked["dies"]:
        os._exit(0)  # its group has lost a rank
    bucket.send_stream, bucket.commit_parts = real
    save(state, LastgoodWriter(url, s3=options_of(asked), timeout_s=20))
    found["again"] = loaded(state, LastgoodReader(url, s3=options_of(asked), timeout_s=20))
    yield found


def saved_anew_meanwhile(rank, asked):
    """One rank looks before a second save takes the name, the other after it."""
    options, url = options_of(asked), asked["url"]
    retire, found = bucket.retire, sources.find_commits
    bucket.retire = lambda *_: None
    for seed in (1, 2):
        save(make_state(seed), LastgoodWriter(url, s3=options, timeout_s=20))
    bucket.retire = retire
    if rank == 1:
        sources.find_commits = lambda *given: found(*given)[::-1]
    reader = LastgoodReader(url, s3=options, timeout_s=20)
    told = refused(lambda: dcp.load(emptied(make_state(0)), storage_reader=reader))
    sources.find_commits = found
    yield {**told, "again": loaded(make_state(2), LastgoodReader(url, s3=options, timeout_s=20))}


def saves_until_killed(rank, asked):
    """Saves of one name, one after another, until a signal comes."""
    del rank
    for seed in range(1000):
        save(make_state(seed), LastgoodWriter(asked["url"], s3=options_of(asked), timeout_s=2))
        yield seed


def what_is_left(rank, asked):
    """The one checkpoint that is there: its step says what each tensor must be."""
    del rank
    into = emptied(make_state(0))
    dcp.load(into, storage_reader=LastgoodReader(asked["url"], s3=options_of(asked), timeout_s=20))
    yield {"step": into["value"]["step"], "differs": differences(make_state(into["value"]["step"]), into)}


WORKS.update(
    {
        one.__name__: one
        for one in (
            in_bucket,
            loads_from_bucket,
            bad_day_in_bucket,
            saved_anew_meanwhile,
            saves_until_killed,
            what_is_left,
        )
    }
)

if __name__ == "__main__":
    serve(one_rank)
