"""Whether a run record shows what a checkpointing system owes: durable checkpoints, and a restore exact to the bit."""

from __future__ import annotations

from lastgood.experiments.records.run import RunRecord

__all__ = ["judge"]


def judge(record: RunRecord, min_durable: int = 2) -> list[str]:
    """What is wrong with a run, one sentence each; empty if nothing is."""
    faults = []
    counts = record.counts
    if counts.durable < min_durable:
        faults.append(f"{counts.durable} durable checkpoints of {counts.started} started, {min_durable} needed")
    if counts.failed:
        faults.append(f"{counts.failed} checkpoints failed: {'; '.join(record.notes) or 'see the log of the run'}")
    proof = record.proof
    if proof is None:
        faults.append("no restore proof in the record")
        return faults
    if proof.restored_step != proof.step:
        faults.append(f"restored step {proof.restored_step} where {proof.step} was the checkpoint to prove")
    if not proof.equal or proof.digest_live != proof.digest_restored:
        faults.append(f"the restored state differs: digest {proof.digest_restored}, live {proof.digest_live}")
    if proof.next_losses_live != proof.next_losses_restored:
        faults.append("training went on with other losses after the restore than without it")
    return faults
