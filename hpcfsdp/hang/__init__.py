"""What a job does about ranks that do not come, that fail, and that leave.

- A rank that has waited in a collective for a second compares its call with those of the ranks that it waits for, over
  torch's store (``waits``). It logs the wait. Ranks that wait for each other in different calls all raise.
- A rank with an uncaught error prints it together with those that fail at the same moment (``tracebacks``), and ends
  all processes. One that exits early notifies the others, and those that wait for it raise. One whose launcher has died
  stops all ranks (``departure``).
- Where MPI goes on after a process has died, every wait looks for such deaths, and raises (``lost``).
- A rank that has waited for minutes asks all nodes, through files in the folder of the run (``inquiry``). On each node
  a thread answers (``watch``) with the last events of its ranks (``events``, which ``calls`` and collectives write) and
  their Python stacks (``stacks``). The rank that asks writes the report (``report``) and raises, which ends the job.
  ``hpcfsdp hang`` asks in the same way.
"""
