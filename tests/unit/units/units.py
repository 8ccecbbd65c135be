"""Modules that are units, without ranks that shard them."""

from torch.distributed.fsdp import MixedPrecision

from hpcfsdp.units.flat_unit import FlatUnit
from hpcfsdp.units.own import Ignored, OwnParams


def mark_as_unit(module, ignored=None):
    """Have a module be the wrapper of a unit that owns nothing."""
    module.__dict__["_unit"] = FlatUnit(
        module,
        "unit",
        [],
        [],
        mesh=None,
        own=OwnParams(),
        ignored=ignored or Ignored(),
        use_orig_params=True,
        mixed_precision=MixedPrecision(),
        full_precision=(),
        flat_owner=module,
    )
