"""The ``hpcfsdp`` command, one module for each verb."""
