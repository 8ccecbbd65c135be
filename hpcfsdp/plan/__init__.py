"""Plans of a training before it runs: memory, traffic, time and checkpoints of a model on imagined ranks.

Everything is arithmetic on the layouts that the engine itself uses. A model is traced once, on the meta device; no
rank is started, and no rank is visited.
"""

from hpcfsdp.plan.choice import Disk, Request
from hpcfsdp.plan.layouts import Precision, Setup
from hpcfsdp.plan.links import DEVICES, Link, Links, link_of, measured_links, measured_rates
from hpcfsdp.plan.models import (
    ModelSource,
    from_factory,
    from_function,
    from_numbers,
    from_run,
    from_transformers,
    shape_of,
)
from hpcfsdp.plan.proposal import Proposal, as_json, propose
from hpcfsdp.plan.step_time import Machine

__all__ = [
    "DEVICES",
    "Disk",
    "Link",
    "Links",
    "Machine",
    "ModelSource",
    "Precision",
    "Proposal",
    "Request",
    "Setup",
    "as_json",
    "from_factory",
    "from_function",
    "from_numbers",
    "from_run",
    "from_transformers",
    "link_of",
    "measured_links",
    "measured_rates",
    "propose",
    "shape_of",
]
