"""The torch.distributed backend ``hpcmpi`` and its rendezvous, for stock torch code."""
