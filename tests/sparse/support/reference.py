"""A synchronous training with compressed gradients, in the plainest way: the oracle of the engine."""

from __future__ import annotations

import copy

import numpy as np
import torch


def top(values, count, width):
    """A mask of the places with the largest (mean) magnitudes; of equal ones the first."""
    padded = torch.nn.functional.pad(values.abs(), (0, -len(values) % width)).view(-1, width)
    weights = padded[:, 0] if width == 1 else padded.double().sum(1)
    if len(values) % width:
        weights[-1] *= width / (len(values) % width)
    chosen = torch.zeros(len(weights), dtype=torch.bool)
    chosen[weights.sort(descending=True, stable=True).indices[:count]] = True
    return chosen.repeat_interleave(width)[: len(values)]


class Reference:
    """Workers in one process: each has a batch, a residual and a mask; all have one model, and one SGD or Adam."""

    velocity_momentum = 0.0
    """Of DGC's velocity, which is sent in place of the gradient, and forgotten where it was sent."""
    clip = None
    """The norm of all workers' gradients together."""

    def __init__(self, model, ranks, share, width=1, lr=0.1, momentum=0.9, adam=False, feedback=True):
        self.model, self.ranks, self.share, self.width = model, ranks, share, width
        self.lr, self.momentum, self.adam, self.feedback = lr, momentum, adam, feedback
        self.trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self.residuals = [{name: torch.zeros(one.numel()) for name, one in self.trained.items()} for _ in range(ranks)]
        self.velocities = [{name: torch.zeros(one.numel()) for name, one in self.trained.items()} for _ in range(ranks)]
        self.moments = {name: torch.zeros(2, one.numel()) for name, one in self.trained.items()}
        self.steps = dict.fromkeys(self.trained, 0)
        self.waiting = []
        """Updates that were sent and not applied, for staleness."""

    def step(self, losses, staleness=0):
        """`losses`: for each worker what goes from the model to its loss. Returns the losses."""
        sums, masks, given = {}, {}, []
        buffers = copy.deepcopy(dict(self.model.named_buffers()))
        for rank in range(self.ranks):
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
            self.model.zero_grad(set_to_none=True)
            loss = losses[rank](self.model)
            loss.backward()
            given.append(float(loss.detach()))
            if rank == 0:  # all go on with the statistics of the first
                first = copy.deepcopy(dict(self.model.named_buffers()))
            factor = self._clipped()
            for name, one in self.trained.items():
                if one.grad is None:
                    continue
                gradient, velocity = one.grad.flatten() * factor, self.velocities[rank][name]
                if self.velocity_momentum:
                    gradient = velocity.mul_(self.velocity_momentum).add_(gradient)
                total = gradient + self.residuals[rank][name]
                elements = max(1, int(one.numel() * self.share / self.ranks + 1e-9))
                mask = top(total, -(-elements // self.width), self.width)
                sent = torch.where(mask, total, torch.zeros(()))
                velocity[mask] = 0
                self.residuals[rank][name] = total - sent if self.feedback else torch.zeros_like(total)
                sums[name] = sent + sums.get(name, torch.zeros(()))
                masks[name] = mask | masks.get(name, torch.zeros((), dtype=torch.bool))
        for name, buffer in self.model.named_buffers():
            buffer.copy_(first[name])
        self.waiting.append({name: (sums[name] * (1 / self.ranks), masks[name]) for name in sums})
        if len(self.waiting) > staleness:
            with torch.no_grad():
                for name, update in self.waiting.pop(0).items():
                    self._apply(name, *update)
        return given

    def _clipped(self):
        if self.clip is None:
            return 1.0
        squares = sum(float(one.grad.double().square().sum()) for one in self.trained.values() if one.grad is not None)
        return min(1.0, self.clip / self.ranks**0.5 / squares**0.5)

    def _apply(self, name, gradient, mask):
        one, moments = self.trained[name].view(-1), self.moments[name]
        self.steps[name] += 1
        if self.adam:
            first = moments[0].lerp(gradient, 1 - 0.9)
            second = (moments[1] * 0.999).addcmul(gradient, gradient, value=1 - 0.999)
            size = self.lr / (1 - 0.9 ** self.steps[name])
            # torch's own root may be MKL's, which is not always the nearest number.
            root = (torch.from_numpy(np.sqrt(second.numpy())) / (1 - 0.999 ** self.steps[name]) ** 0.5).add(1e-8)
            new = torch.stack([one.addcdiv(first, root, value=-size), first, second])
        else:
            first = gradient.clone() if self.steps[name] == 1 else (moments[0] * self.momentum).add(gradient, alpha=1)
            new = torch.stack([one.add(first, alpha=-self.lr), first, moments[1]])
        # What nobody sent does not move.
        for old, value in zip((one, moments[0], moments[1]), new, strict=True):
            old.copy_(torch.where(mask, value, old))
