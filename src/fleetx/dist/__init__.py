"""The job: ranks, collectives, progress records, stop signals. Only this package uses torch.distributed."""
