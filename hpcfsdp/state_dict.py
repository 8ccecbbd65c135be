"""State dicts under the names of ``torch.distributed.checkpoint.state_dict``: switching is one import line.

For models without units of this package these are torch's own functions.
"""

from torch.distributed.checkpoint.state_dict import StateDictOptions

from hpcfsdp.state.dcp import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
