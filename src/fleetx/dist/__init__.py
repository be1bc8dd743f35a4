"""The job: ranks, collectives, signals. The only user of torch.distributed."""
