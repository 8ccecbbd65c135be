"""Checks before an optimizer steps: it must step the shards.

An optimizer built before wrapping may hold parameters that units have replaced.
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpcfsdp import _compat
from hpcfsdp.engine.root import Root
from hpcfsdp.errors import EngineError
from hpcfsdp.params.flat_param import flat_params
from hpcfsdp.params.granularity import block_numel
from hpcfsdp.units.local_clip import look_for_local_clipping
from hpcfsdp.units.optimizer_probe import Split, check_on_shards, cut_runs, whole_runs
from hpcfsdp.units.own import hidden_fqn, is_replaced, num_replaced, whole_shape

_roots: weakref.WeakValueDictionary[int, Root] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


@functools.cache
def watch_optimizers() -> None:
    """Check each optimizer of this process before its first step. Further calls do nothing."""
    register_optimizer_step_pre_hook(_check)


def watch_root(root: Root) -> None:
    """Reshard units of `root` before an optimizer steps, if a forward has left them unsharded."""
    _roots[next(_numbers)] = root


def _check(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    params = {param for group in optimizer.param_groups for param in group["params"]}
    for _, root in sorted(_roots.items()):  # in the same order on all ranks
        root.before_step(params)
        if root.holds_grads:
            root.refuse_held(f"a step of {type(optimizer).__name__}", params)
    look_for_local_clipping(optimizer)
    known = sum(len(group["params"]) for group in optimizer.param_groups), num_replaced()
    if _checked.get(optimizer) == known:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            fqn = hidden_fqn(param)
            if fqn is not None and is_replaced(param):
                raise EngineError(
                    f"the {type(optimizer).__name__} steps {fqn!r}, but the module has been assigned another "
                    "parameter since: build the optimizer after that, or change the parameter in place"
                )
            if fqn is not None:
                hint = "build the optimizer from model.parameters() after wrapping the model"
                if isinstance(param, DTensor):  # shown within summon_full_params alone
                    hint += ", outside of summon_full_params"
                else:
                    hint += ", or wrap it with use_orig_params=True"
                raise EngineError(
                    f"the {type(optimizer).__name__} steps {fqn!r}, which was sharded after the optimizer was built "
                    "and gets no gradient: " + hint
                )
    _warn_of_decay(optimizer)
    splits = sorted(set(_splits(params)), key=lambda split: split.__name__)  # on all ranks alike
    for each in dict.fromkeys((optimizer, *_compat.calling_optimizers())) if splits else ():  # some step by another
        for split in splits:
            check_on_shards(each, split)
    _checked[optimizer] = known


def _splits(params: set[Any]) -> Iterator[Split]:
    """How ranks hold those of `params` that are of flat parameters and sharded."""
    for flat in list(flat_params):  # a closure may be the first to call the model, so there may be no root
        if flat.comm.size > 1 and not params.isdisjoint(flat.stepped):
            slots = flat.layout.slots if flat.use_orig_params else ()
            whole = [not slot.is_cut and block_numel(slot.granularity, slot.shape) >= slot.numel for slot in slots]
            yield whole_runs if whole and all(whole) else cut_runs


def _warn_of_decay(optimizer: torch.optim.Optimizer) -> None:
    """Warn if groups were made by the number of dimensions of shards: then no sharded matrix decays."""
    decayed = [p for group in optimizer.param_groups if group.get("weight_decay") for p in group["params"]]
    others = [p for group in optimizer.param_groups if not group.get("weight_decay") for p in group["params"]]
    decays = any(group.get("weight_decay") for group in optimizer.param_groups)
    matrices = sum(param.dim() < 2 <= len(whole_shape(param) or ()) for param in others)
    if decays and matrices and all(param.dim() >= 2 for param in decayed):
        warnings.warn(
            f"the {type(optimizer).__name__} applies no weight decay to any sharded matrix ({matrices} of them have "
            "1-D shards here): choose its groups by the whole shapes in hpcfsdp.param_info(model), or with "
            "hpcfsdp.param_groups(model, weight_decay=...)",
            stacklevel=5,
        )
