"""Copies of chunks by running a ring, the formula by its worked example, and the simulation against the formula."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from lastgood.errors import ConfigError
from lastgood.mirror.odds import Loss, RingJob, chunk_copies, lost_step_probability, propose, simulate
from lastgood.wire.ring import is_final, sent_chunk, step_count


@pytest.mark.parametrize("ranks", range(2, 12))
@pytest.mark.parametrize("watched", [[0], [0, 1], [1], [0, 1, 2]])
def test_copies_are_what_passes_the_ports(ranks: int, watched: list[int]) -> None:
    if max(watched) >= ranks:
        pytest.skip("no such rank")
    copies = [0] * ranks
    for rank in range(ranks):
        for step in range(step_count(ranks)):
            if is_final(ranks, step):
                ports = [one for one in watched if one in (rank, (rank + 1) % ranks)]
                copies[sent_chunk(ranks, rank, step)] += len(ports)
    assert chunk_copies(ranks, watched) == copies


def test_the_table_of_few_ranks() -> None:
    assert sorted(chunk_copies(2, [0])) == [1, 1]
    assert sorted(chunk_copies(2, [0, 1])) == [2, 2]
    assert sorted(chunk_copies(3, [0])) == [1, 1, 2]
    assert sorted(chunk_copies(3, [0, 1])) == [2, 3, 3]
    assert sorted(chunk_copies(8, [0, 1])) == [2, 3, 3, 4, 4, 4, 4, 4]
    assert sorted(chunk_copies(8, [0, 4])) == [3, 3, 3, 3, 4, 4, 4, 4]


def test_the_formula_s_worked_example() -> None:
    job = RingJob(24, 10 << 30, 1024)
    assert lost_step_probability(job, [0], 1e-9) == pytest.approx(8.7e-4, rel=0.01)
    assert lost_step_probability(job, [0, 1], 1e-9) == pytest.approx(4.4e-13, rel=0.01)
    assert lost_step_probability(job, [0], 0) == 0
    assert lost_step_probability(RingJob(4, 4, 4), [], 0.5) == 1


@pytest.mark.parametrize(("ranks", "watched"), [(2, [0]), (3, [0]), (4, [0, 2]), (4, [0, 1])])
def test_the_simulation_agrees_where_losses_are_independent(ranks: int, watched: list[int]) -> None:
    job = RingJob(ranks, ranks * 50 * 1024, 1024)
    loss = 0.005 if len(watched) == 1 else 0.08
    wanted = lost_step_probability(job, watched, loss)
    steps = 1500
    found = simulate(job, watched, Loss(loss), steps, seed=4)
    assert abs(found - wanted) < 5 * math.sqrt(wanted * (1 - wanted) / steps) + 1e-9
    assert simulate(job, watched, Loss(loss), 50, seed=4) == simulate(job, watched, Loss(loss), 50, seed=4)


def test_bursts_of_the_same_share_cost_fewer_steps_but_heal_worse() -> None:
    job = RingJob(3, 3 * 100 * 1024, 1024)
    alone = simulate(job, [0], Loss(0.003), 1500)
    in_bursts = simulate(job, [0], Loss(0.003, 20), 1500)
    assert in_bursts < alone / 2


def test_ranks_apart_come_before_neighbours() -> None:
    job = RingJob(8, 1 << 20, 1024)
    apart, neighbours = propose(job, 2, 1e-4)
    assert apart.watched[1] - apart.watched[0] > 1 and neighbours.watched == (0, 1)
    assert apart.copies == {3: 4, 4: 4} and neighbours.copies == {2: 1, 3: 2, 4: 5}
    assert apart.probability < neighbours.probability
    assert [one.watched for one in propose(RingJob(3000, 1 << 30, 4096), 3, 1e-4)] == [(0, 1000, 2000), (0, 1, 2)]


def test_what_no_ring_has_is_refused() -> None:
    for wrong in (
        lambda: RingJob(1, 1, 1),
        lambda: RingJob(2, 0, 1),
        lambda: Loss(1),
        lambda: Loss(0.1, 0),
        lambda: chunk_copies(3, [3]),
        lambda: chunk_copies(3, [1, 1]),
        lambda: propose(RingJob(2, 1, 1), 3, 0.1),
        lambda: simulate(RingJob(2, 1 << 50, 1), [0], Loss(0.1), 1),
    ):
        with pytest.raises(ConfigError):
            wrong()


def test_the_command_proposes_and_simulates() -> None:
    from lastgood.cli.mirror import app

    run = CliRunner().invoke(
        app, ["odds", "--ranks", "8", "--gradient", "1MiB", "--loss", "1e-3", "--count", "2", "--steps", "20", "--json"]
    )
    assert run.exit_code == 0, run.output
    best = json.loads(run.stdout)["choices"][0]
    assert best["copies"] == {"3": 4, "4": 4} and 0 <= best["simulated"] <= 1
    run = CliRunner().invoke(app, ["odds", "--ranks", "3", "--gradient", "1MiB", "--watch", "0,1"])
    assert run.exit_code == 0 and "0, 1" in run.output
