"""What all tests share."""

import gc


def pytest_collection_finish():
    """Leave what is there now, a million objects of torch and pytest, alone in each collection of garbage."""
    gc.collect()
    gc.freeze()
