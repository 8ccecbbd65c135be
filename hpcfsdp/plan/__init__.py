"""Plans of a training before it runs: memory, traffic, time and checkpoints of a model on imagined ranks.

Everything is arithmetic on the layouts that the engine itself uses. A model is traced once, on the meta device; no
rank is started, and no rank is visited.
"""

from hpcfsdp.plan.decoder import shape_of
from hpcfsdp.plan.layouts import Precision, Setup
from hpcfsdp.plan.links import DEVICES, Link, Links, link_of, measured_links
from hpcfsdp.plan.models import Source, from_factory, from_function, from_numbers, from_run, from_transformers
from hpcfsdp.plan.proposal import Proposal, Request, as_json, propose
from hpcfsdp.plan.saving import Disk
from hpcfsdp.plan.step_time import Machine

__all__ = [
    "DEVICES",
    "Disk",
    "Link",
    "Links",
    "Machine",
    "Precision",
    "Proposal",
    "Request",
    "Setup",
    "Source",
    "as_json",
    "from_factory",
    "from_function",
    "from_numbers",
    "from_run",
    "from_transformers",
    "link_of",
    "measured_links",
    "propose",
    "shape_of",
]
