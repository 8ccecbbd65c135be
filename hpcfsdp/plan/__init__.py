"""Plans of a training before it runs: memory, traffic, time and checkpoints of a model on imagined ranks.

Everything is arithmetic on the layouts that the engine itself uses. A model is traced once, on the meta device; no
rank is started, and no rank is visited.
"""

from hpcfsdp.plan.choice import Disk as Disk, Request as Request
from hpcfsdp.plan.layouts import Precision as Precision, Setup as Setup
from hpcfsdp.plan.links import (
    DEVICES as DEVICES,
    Link as Link,
    Links as Links,
    link_of as link_of,
    measured_links as measured_links,
)
from hpcfsdp.plan.models import (
    ModelSource as ModelSource,
    from_factory as from_factory,
    from_function as from_function,
    from_numbers as from_numbers,
    from_run as from_run,
    from_transformers as from_transformers,
    shape_of as shape_of,
)
from hpcfsdp.plan.proposal import Proposal as Proposal, as_json as as_json, propose as propose
from hpcfsdp.plan.step_time import Machine as Machine
