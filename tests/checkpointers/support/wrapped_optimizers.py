"""Optimizers around another optimizer, each with a peculiarity of one in the wild; written for these tests."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

import torch


class Forwarding(torch.optim.Optimizer):
    """As accelerate's: no constructor of torch's, so none of its hooks; all else is the inner one's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


class SlowWeights(torch.optim.Optimizer):
    """As timm's Lookahead: containers for hooks that no step ever calls, a state of its own that stays empty."""

    def __init__(self, base: torch.optim.Optimizer, every: int = 2) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._base = base
        self.param_groups = base.param_groups
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group.update(slow_every=every, slow_step=0)

    @torch.no_grad()
    def step(self, closure=None):
        loss = self._base.step(closure)
        for group in self.param_groups:
            group["slow_step"] += 1
            if group["slow_step"] % group["slow_every"] == 0:
                for weight in group["params"]:
                    slow = self._base.state[weight].setdefault("slow", weight.detach().clone())
                    slow.lerp_(weight, 0.5)
                    weight.copy_(slow)
        return loss

    def state_dict(self):
        return self._base.state_dict()

    def load_state_dict(self, state):
        self._base.load_state_dict(state)
        self.param_groups = self._base.param_groups


class OwnLayout(torch.optim.Optimizer):
    """As other Lookaheads: a state_dict that holds the inner one's beside its own, under other names."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    state = property(lambda self: self.inner.state)
    param_groups = property(lambda self: self.inner.param_groups)

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.inner.step(closure)
        weights = [p for group in self.param_groups for p in group["params"]]
        for slow, weight in zip(self.slow, weights, strict=True):
            slow.lerp_(weight, 0.5)
            weight.copy_(slow)
        return loss

    def state_dict(self):
        return {"slow": {(0, i): slow for i, slow in enumerate(self.slow)}, "inner": self.inner.state_dict()}

    def load_state_dict(self, state):
        self.slow = [slow.clone() for slow in state["slow"].values()]
        self.inner.load_state_dict(state["inner"])


class ScheduleFree:
    """As ScheduleFree's wrapper: no class of torch's, moves the weights before the inner step, and in eval()."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base

    state = property(lambda self: self.base.state)
    param_groups = property(lambda self: self.base.param_groups)

    @torch.no_grad()
    def eval(self) -> None:
        for weight in self.base.param_groups[0]["params"]:
            weight.mul_(0.5)

    @torch.no_grad()
    def train(self) -> None:
        for weight in self.base.param_groups[0]["params"]:
            weight.mul_(2)

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.base.param_groups[0]["params"]:
            self.state[weight].setdefault("z", weight.clone())
            weight.lerp_(self.state[weight]["z"], 0.5)
        return self.base.step(closure)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)


class CountsUnderAName(torch.optim.Optimizer):
    """As madgrad: what belongs to no parameter is kept in the state, under a name."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        self.state.setdefault("k", torch.tensor([0]))
        self.state.setdefault("calls", 0)
        self.state["k"] += 1
        self.state["calls"] += 1
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["seen"] = self.state[weight].get("seen", torch.zeros_like(weight)) + weight.grad
                weight.sub_(self.state[weight]["seen"], alpha=0.01 / float(self.state["k"]))


WRAPPERS = [Forwarding, SlowWeights, OwnLayout, ScheduleFree]
