"""Modules that are units, without ranks that shard them."""

from hpcfsdp.units.flat_unit import FlatUnit
from hpcfsdp.units.own import Ignored, OwnParams, UnitOptions


def mark_as_unit(module, ignored=None):
    """Have a module be the wrapper of a unit that owns nothing."""
    options = UnitOptions(ignored=ignored or Ignored(), use_orig_params=True)
    module.__dict__["_unit"] = FlatUnit(
        module, "unit", [], mesh=None, own=OwnParams(), options=options, flat_owner=module
    )
