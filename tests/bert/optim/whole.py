"""A rule on whole parameters: the expected result of the engine with its buckets and shards."""

from __future__ import annotations

import torch

from bert.optim.rules import ParameterShards, Update, squared_norms


class Whole:
    """Steps by the parameters' gradients. masters: fp32 by name, of parameters in low precision."""

    def __init__(self, named_parameters, make_rule, masters=None):
        named = dict(named_parameters)
        self.names, self.parameters = list(named), list(named.values())
        low = [p.dtype in (torch.float16, torch.bfloat16) for p in self.parameters]
        copies = [p.detach() for p in self.parameters]
        for number, (name, is_low) in enumerate(zip(self.names, low, strict=True)):
            if is_low:
                exact = masters[name] if masters else copies[number]
                copies[number] = exact.to(torch.float32, copy=True)
        self.states, self.others = {}, {}
        self.shards = ParameterShards(
            names=self.names,
            shapes=[p.shape for p in self.parameters],
            starts=[0] * len(copies),
            masters=copies,
            device=copies[0].device,
            state=self._state,
            keep=lambda name, tensor: self.others.setdefault(name, tensor),
        )
        self.rule = make_rule(self.shards)

    @torch.no_grad()
    def step(self, lr, grad_scale=1.0, apply_update=None):
        gradients = [p.grad for p in self.parameters]
        sq_norms = squared_norms(gradients) if self.rule.needs_norms else None
        update = Update(lr, grad_scale, apply_update, sq_norms, lambda sums: sums)
        self.rule.step(gradients, update)
        torch._foreach_copy_([p.detach() for p in self.parameters], self.shards.masters)

    def state_tensors(self):
        states = (tensor for part in self._parts().values() for tensor in part)
        weights = (p.detach() for p in self.parameters)
        return [*weights, *states, *self.others.values(), self.rule.num_steps]

    def _state(self, name, of_weights=False):
        copied = torch.clone if of_weights else torch.zeros_like
        self.states[name] = [copied(m) for m in self.shards.masters]
        return self.states[name]

    def _parts(self):
        return {"masters": self.shards.masters, **self.states}

    def state_dict(self):
        by_name = lambda tensors: dict(zip(self.names, tensors, strict=True))  # noqa: E731
        parts = {name: by_name(tensors) for name, tensors in self._parts().items()}
        return {"num_steps": int(self.rule.num_steps), **parts}

    @torch.no_grad()
    def load_state_dict(self, state):
        self.rule.num_steps.fill_(state["num_steps"])
        for part, tensors in self._parts().items():
            for name, tensor in zip(self.names, tensors, strict=True):
                tensor.copy_(state[part][name])
        torch._foreach_copy_([p.detach() for p in self.parameters], self.shards.masters)
