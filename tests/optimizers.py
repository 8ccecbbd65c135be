"""Optimizers that look at more than one element, as users write them."""

import torch
from torch import optim


class Own(optim.Optimizer):
    """Steps by ``update`` of a parameter and its gradient."""

    def __init__(self, params, lr=0.01, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                param -= group["lr"] * self.update(param, param.grad)


class Lamb(Own):
    def update(self, param, grad):
        return grad * param.norm() / grad.norm()


class Prodigy(optim.Optimizer):
    """The estimate of the distance begins so small that it moves no parameter in a few steps."""

    def __init__(self, params, lr=1e-3, d0=1e-6):
        super().__init__(params, {"lr": lr, "d": d0, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            total = 0.0
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(start=param.clone(), sum=torch.zeros_like(param))
                group["numerator"] += (param.grad * (state["start"] - param)).sum().item() * group["d"]
                total += state["sum"].add_(param.grad, alpha=group["d"]).abs().sum().item()
            group["d"] = max(group["d"], group["numerator"] / total)
            for param in group["params"]:
                param -= group["lr"] * group["d"] * param.grad.sign()


class Sam(optim.Optimizer):
    """Foret et al.: the gradient at the worst place nearby, by a norm over all parameters."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            self.state[param]["old"] = param.clone()
            param += self.param_groups[0]["rho"] * param.grad / norm
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            param.copy_(self.state[param]["old"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None
        torch.enable_grad()(closure)()
        self.first_step(zero_grad=True)
        torch.enable_grad()(closure)()
        self.second_step()
