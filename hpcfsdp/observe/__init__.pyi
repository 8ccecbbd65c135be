"""What type checkers see of the names that are loaded on first use."""

from hpcfsdp.observe.observed import Run as Run
from hpcfsdp.observe.trackers import (
    TensorBoard as TensorBoard,
    Tracker as Tracker,
    WandB as WandB,
    check_trackers as check_trackers,
)
