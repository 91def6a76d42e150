"""Any torch.optim.Optimizer as a rule on whole parameters, with all of its state in checkpoints.

Such an optimizer makes its state in its first step, in dicts, as tensors and numbers, where nobody
else sees it. So the adapter takes a step when it is made, to learn what there is, and undoes it.
Each entry then has a tensor of the shard: one of the masters' shape and type a named state, as our
own rules have; any other, numbers included, a tensor of its own. These are what is saved, restored
and rolled back, in place, and before each step the optimizer is given what they hold.
"""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bert.optim.rules import ParameterShards, Rule, Update, is_decayed, scaled
from common.env import ConfigError
from common.process import one_line

PROBE = (
    1e-3  # the gradient of the step that is undone: not 0, of which some make no state
)
Groups = list[dict[str, Any]]
Owner = (
    nn.Parameter | int | None
)  # of an entry: a parameter, a group's number, the optimizer


class Place(NamedTuple):
    """An entry of the state. held: where it is saved; None: a constant. value: after the probe."""

    owner: Owner
    key: Any
    value: Any
    held: Tensor | None


class Adapter(Rule):
    """The rule of the optimizer that ``make`` returns.

    It waits for the device at each step, and runs outside of CUDA graphs: such an optimizer takes
    its rate as a number, and may keep others on the host, which a graph would freeze.
    """

    needs_whole = True
    capturable = False

    def make(self, groups: Groups, config: Any) -> torch.optim.Optimizer:
        """The optimizer of ``groups``: the decayed parameters, and the others with a weight decay
        of 0. config: settings of the rule. Each step sets the rate.
        """
        raise NotImplementedError

    def __init__(self, shards: ParameterShards, config: Any = None) -> None:
        super().__init__(shards, config)
        self.parameters = [self._parameter(i) for i in range(len(shards.masters))]
        self.numbers = {parameter: i for i, parameter in enumerate(self.parameters)}
        parts: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
        for parameter, name in zip(self.parameters, shards.names, strict=True):
            parts[not is_decayed(name)].append(parameter)
        groups: Groups = [
            {"params": parts[0]},
            {"params": parts[1], "weight_decay": 0.0},
        ]
        self.optimizer = self.make(
            [group for group in groups if group["params"]], config
        )
        self.pristine = {place[:2]: place[2] for place in self._entries(copied=True)}
        self._take_a_step_and_undo_it()
        self.flats: dict[Any, list[Tensor]] = {}
        self.places = [Place(*entry, self._held(*entry)) for entry in self._entries()]
        # Whether a step was taken: what an entry begins with is often the first gradient.
        self.has_begun = shards.keep("has_begun", torch.zeros((), dtype=torch.int64))

    def _parameter(self, number: int) -> nn.Parameter:
        """A master in its parameter's shape; on meta, where no step can be taken, a small one."""
        shape = self.shards.shapes[number]
        if self.shards.device.type == "meta":
            return nn.Parameter(torch.zeros([2] * len(shape)))
        return nn.Parameter(self.shards.masters[number].view(shape))

    def _take_a_step_and_undo_it(self) -> None:
        """Masters and random numbers remain as they were."""
        before = [parameter.detach().clone() for parameter in self.parameters]
        devices = [self.shards.device] if self.shards.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                for parameter in self.parameters:
                    parameter.grad = torch.full_like(parameter, PROBE)
                self.optimizer.step()
        except Exception as error:
            reason = one_line(f"{type(error).__name__}: {error}")
            raise self._refusal(f"a step fails ({reason:.200})") from None
        for parameter, values in zip(self.parameters, before, strict=True):
            parameter.data.copy_(values)
            parameter.grad = None

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(
            f"{type(self.optimizer).__name__}: {why}: "
            "an Adapter takes steps on dense gradients alone, and state of tensors and numbers"
        )

    # --- its entries

    def _mapping(self, owner: Owner) -> Any:
        if isinstance(owner, int):
            return self.optimizer.param_groups[owner]
        state: Any = self.optimizer.state
        return state if owner is None else state.setdefault(owner, {})

    def _entries(self, copied: bool = False) -> Iterator[tuple[Owner, Any, Any]]:
        """(owner, key, value) of all there is now."""
        owners: list[Owner] = [None, *range(len(self.optimizer.param_groups))]
        owners += [p for p in self.parameters if p in self.optimizer.state]
        for owner in owners:
            for key, value in self._mapping(owner).items():
                if key != "params" and not (owner is None and key in self.numbers):
                    yield owner, key, copy.deepcopy(value) if copied else value

    def _held(self, owner: Owner, key: Any, value: Any) -> Tensor | None:
        """The tensor of the shard for an entry."""
        number = self.numbers[owner] if isinstance(owner, nn.Parameter) else None
        name = f"{owner if number is None else self.shards.names[number]}: {key}"
        if number is not None and _is_like(value, self.parameters[number]):
            if key not in self.flats:
                self.flats[key] = self.shards.state(str(key))
            return self.flats[key][number].view(self.shards.shapes[number])
        if isinstance(value, Tensor):
            return self.shards.keep(name, value.detach().clone())
        if isinstance(value, (int, float)):
            dtype = torch.float64 if isinstance(value, float) else torch.int64
            return self.shards.keep(name, torch.zeros((), dtype=dtype))
        if number is not None and not isinstance(value, (str, tuple, type(None))):
            raise self._refusal(f"{name} is a {type(value).__name__}")
        return None

    def _give(self) -> None:
        """Gives the optimizer what is held; before its first step what it was made with."""
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            for key in group.keys() - {"params"}:
                del group[key]
        if not int(self.has_begun):
            for (owner, key), value in self.pristine.items():
                self._mapping(owner)[key] = copy.deepcopy(value)
            return
        for owner, key, value, held in self.places:
            if held is not None:
                is_number = isinstance(value, (int, float))
                value = type(value)(held.item()) if is_number else held
            self._mapping(owner)[key] = value

    def _take(self) -> None:
        """Takes the new values. Raises ConfigError if there is more, or other, than was found."""
        now = {(owner, key): value for owner, key, value in self._entries()}
        if late := now.keys() - {place[:2] for place in self.places}:
            raise self._refusal(f"{next(iter(late))[1]} appears after the first step")
        for owner, key, value, held in self.places:
            new = now[owner, key]
            if held is None or isinstance(new, Tensor) != isinstance(value, Tensor):
                if type(new) is not type(value) or new != value:
                    raise self._refusal(
                        f"{key} changes from {value!s:.40} to {new!s:.40}"
                    )
            elif not isinstance(new, Tensor):
                if held.fill_(new).item() != new:
                    raise self._refusal(f"{key} of {new} is no longer a {held.dtype}")
            elif new is not held:
                held.copy_(new)

    # --- its steps

    def step(self, gradients: list[Tensor], update: Update) -> None:
        # The host waits for the device, here and for the rate.
        if update.apply_update is not None and not bool(update.apply_update):
            return
        self._give()
        values = scaled(gradients, self.shards.masters, update.scale)
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.grad = value.view(parameter.shape)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(torch.as_tensor(update.lr))
            else:
                group["lr"] = float(update.lr)
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self._take()
        self.has_begun.fill_(1)
        self.count_step(None)


def _is_like(value: Any, parameter: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.dtype == parameter.dtype
        and value.device == parameter.device
    )
