"""A rule on whole parameters: the expected result of the engine with its buckets and shards."""

import torch

from bert.optim.rules import ParameterShards, Update, squared_norms


class Whole:
    """Steps by the parameters' gradients, of fp32 or more."""

    def __init__(self, named_parameters, make_rule):
        named = dict(named_parameters)
        self.names, self.parameters = list(named), list(named.values())
        copies = [p.detach() for p in self.parameters]
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

    def state_tensors(self):
        states = (tensor for part in self._parts().values() for tensor in part)
        return [*states, *self.others.values(), self.rule.num_steps]

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
