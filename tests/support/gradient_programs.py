"""What users do to gradients and weights between backward and step: adversarial rows, SAM, repairs,
logs; by a seed."""

import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

STEPS = 3
Action = Callable[["GradientProgram"], None]


def _learning(model: "GradientProgram") -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


def _scale_by_norm(model: "GradientProgram") -> None:
    norm = torch.norm(
        torch.stack([parameter.grad.detach().norm(2) for parameter in _learning(model)]), 2
    )
    for parameter in _learning(model):
        parameter.grad.data.mul_(0.5 / (norm + 0.1))


def _zero_not_finite(model: "GradientProgram") -> None:
    for parameter in _learning(model):
        gradient = parameter.grad
        if not torch.isfinite(gradient).all():
            gradient[gradient != gradient] = 0.0
            gradient.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _zero_nan_by_where(model: "GradientProgram") -> None:
    for parameter in _learning(model):
        if torch.isnan(parameter.grad).any() or torch.isinf(parameter.grad).any():
            parameter.grad = torch.where(
                torch.isfinite(parameter.grad), parameter.grad, torch.zeros_like(parameter.grad)
            )


def _clamp(model: "GradientProgram") -> None:
    for parameter in _learning(model):
        parameter.grad.clamp_(-0.01, 0.02)


def _decay(model: "GradientProgram") -> None:
    for parameter in _learning(model):
        parameter.grad.add_(parameter.data, alpha=0.01)


def _replace(model: "GradientProgram") -> None:
    for parameter in _learning(model):
        parameter.grad = parameter.grad * 0.7


def _shift(model: "GradientProgram") -> None:
    for parameter in _learning(model):
        parameter.grad += 0.001


def _limit_rows(model: "GradientProgram") -> None:
    for parameter in _learning(model):
        largest = parameter.grad.abs().max()
        if largest > 0.01:
            parameter.grad /= largest * 50


def _log(model: "GradientProgram") -> None:
    for name, parameter in model.named_parameters():
        values = [
            parameter.abs().max(),
            parameter.data.min(),
            parameter.std(),
            parameter.detach().mean(),
        ]
        if parameter.grad is not None:
            gradient = parameter.grad
            values += [
                gradient.abs().sum(),
                gradient.norm(float("inf")),
                (gradient != 0).sum(),
                gradient.std(),
            ]
        model.logs.append((name, [float(value) for value in values]))


ACTIONS: dict[str, Action] = {
    "scale by norm": _scale_by_norm,
    "zero not finite": _zero_not_finite,
    "zero nan by where": _zero_nan_by_where,
    "clamp": _clamp,
    "decay": _decay,
    "replace": _replace,
    "shift": _shift,
    "limit": _limit_rows,
    "log": _log,
}


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as its users write it, around another optimizer."""

    def __init__(self, params: Any, base: type, rho: float = 0.3, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        """Climb to the largest loss around the weights."""
        parameters = [
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = torch.norm(
            torch.stack([((torch.abs(p) + 1.0) * p.grad).norm(p=2) for p in parameters]), p=2
        )
        for parameter in parameters:
            self.state[parameter]["old_p"] = parameter.data.clone()
            parameter.add_(
                (torch.abs(parameter) + 1.0)
                * parameter.grad
                * (self.defaults["rho"] / (norm + 1e-12))
            )
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Go back, and step with the gradient there."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = self.state[parameter]["old_p"]
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:
        """Step twice. closure: computes the loss and its gradients."""
        closure = torch.enable_grad()(closure)
        closure()
        self.first_step()
        closure()
        self.second_step()


class LAMB(torch.optim.Optimizer):
    """Gradient steps as long as the weight's norm allows, by torch's functions of lists."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            averages = [self.state[p].setdefault("average", torch.zeros_like(p)) for p in weights]
            torch._foreach_mul_(averages, 0.5)
            torch._foreach_add_(averages, [p.grad for p in weights], alpha=0.5)
            for weight, average in zip(weights, averages, strict=True):
                ratio = float(weight.norm()) / max(float(average.norm()), 1e-3)
                weight.add_(average, alpha=-group["lr"] * min(ratio, 5.0))
        return loss


class GradientProgram(pl.LightningModule):
    """Trains two tables and a layer, and does to gradients what a seed draws. manual: by manual
    optimization."""

    def __init__(self, seed: int, manual: bool) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(23, 8), nn.Embedding(31, 8)
        self.layer = nn.Linear(8, 4)
        draw = random.Random(seed)
        self.automatic_optimization = not manual
        self.attack = draw.choice(["", "fgm", "sam", "SAM"]) if manual else ""
        self.actions = [draw.choice(list(ACTIONS)) for _ in range(draw.randint(1, 4))]
        self.optimizer, self.hook = (
            draw.choice(["SGD", "Adagrad", "Adam", "LAMB"]),
            draw.random() < 0.5,
        )
        self.breaks = self.attack.lower() != "sam" and draw.random() < 0.4
        if self.breaks:
            self.actions.insert(0, draw.choice(["zero not finite", "zero nan by where"]))
        self.logs: list[tuple[str, list[float]]] = []

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch, or the mean of several, whose gradients are not finite for
        one row where the seed says so."""
        if not isinstance(batch[0], Tensor):
            return torch.stack([self.loss(part) for part in batch]).mean()
        users, items = (
            self.layer(table(ids))
            for table, ids in zip((self.users, self.items), batch, strict=True)
        )
        loss = (users.tanh() * items).square().mean()
        if self.breaks:
            loss = (
                loss
                + torch
                .where(batch[0] == 3, float("nan"), 0.0)
                .unsqueeze(1)
                .mul(self.users(batch[0]))
                .nansum()
            )
        return loss

    def act(self) -> None:
        """Do to gradients what the seed has drawn."""
        for name in self.actions:
            ACTIONS[name](self)

    def run_manual_step(
        self, compute: Callable[[], Tensor], backward: Callable[[Tensor], Any], optimizer: Any
    ) -> None:
        """Do a step of manual optimization. compute: returns the loss."""
        optimizer.zero_grad()
        if self.attack == "SAM":
            optimizer.step(lambda: backward(compute()))
            return
        backward(compute())
        if self.attack:
            backup = self._move_rows() if self.attack == "fgm" else self._climb()
            if self.attack == "sam":
                optimizer.zero_grad()
            backward(compute())
            for name, parameter in self.named_parameters():
                if name in backup:
                    parameter.data = backup[name]
        self.act()
        optimizer.step()

    def _move_rows(self) -> dict[str, Tensor]:
        backup = {}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad and name.startswith(("users", "items")):
                backup[name] = parameter.data.clone()
                norm = torch.norm(parameter.grad)
                if norm != 0 and not torch.isnan(norm):
                    parameter.data.add_(0.5 * parameter.grad / norm)
        return backup

    def _climb(self) -> dict[str, Tensor]:
        norm = torch.stack([parameter.grad.norm(p=2) for parameter in _learning(self)]).norm(p=2)
        backup = {name: p.data.clone() for name, p in self.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for parameter in _learning(self):
                parameter.add_(parameter.grad * (0.3 / (norm + 1e-12)))
        return backup

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        self.run_manual_step(lambda: self.loss(batch), self.manual_backward, self.optimizers())
        return None

    def on_after_backward(self) -> None:
        if self.automatic_optimization and self.hook:
            self.act()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.automatic_optimization and not self.hook:
            self.act()

    def configure_optimizers(self) -> Any:
        if self.attack == "SAM":
            return SAM(self.parameters(), torch.optim.SGD, lr=0.5, momentum=0.5)
        if self.optimizer == "LAMB":
            return LAMB(self.parameters(), lr=0.05)
        if self.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), lr=0.5)
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.02, eps=1e-3)


def gradient_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return one rank's batch of one step: users and items."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 23, (6,), generator=draw), torch.randint(0, 31, (6,), generator=draw)


def as_list(batches: list[Any]) -> list[Any]:
    """Return the batches of all ranks, of whose losses one process takes the mean."""
    return batches


def logged(model: GradientProgram) -> Tensor:
    """Return all numbers that a program has logged."""
    values = [value for _, values in model.logs for value in values]
    return torch.tensor(values).nan_to_num()
