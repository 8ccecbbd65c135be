"""The example training job: a byte-level GPT on real files, the way a job of one's own would be built."""
